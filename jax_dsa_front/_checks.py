"""Argument checks of the public functions: every message names argument, rule, expected and got.

They look at shapes, dtypes and Python values only, never into a JAX array.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa_front._config import (
    ARRAYS,
    HEAD_DIM,
    IMPLEMENTATIONS,
    ROW_BYTES,
    STACKABLE,
    WEIGHTS_DTYPES,
    FrontConfig,
)

SHAPES = {  # by rank
    "projected": {2: "(B, P)"},
    "q_norm": {1: "(K,)", 2: "(L, K)"},
    "wq_b": {2: "(H*128, K)", 3: "(L, H*128, K)"},
    "key_norm_weight": {1: "(128,)", 2: "(L, 128)"},
    "key_norm_bias": {1: "(128,)", 2: "(L, 128)"},
    "cache": {3: "(pages, page_size, {row})", 4: "(L, pages, page_size, {row})"},
    "slots": {1: "(B,)"},
    "key": {2: "(B, >= key_offset + 128)"},
    "head_weights": {2: "(B, >= weight_offset + H)"},
    "query": {3: "(B, H, {columns})"},
    "query_scale": {2: "(B, H)"},
    "weights": {2: "(B, H)"},
    "block_table": {2: "(B, N)"},
    "context_lens": {1: "(B,)"},
}
CONCRETE = (jax.Array, np.ndarray)  # tracers are jax.Arrays
INTEGERS = ("int32", "int64")
FLOATS = ("bfloat16", "float32")
MAX_PAGE_SIZE = 2**25  # the position of a four-byte word in its page is an int32
MAX_PAGES = 2**31 - 2  # `pages` itself is the index of "nowhere"
MAX_HEADS = 2**24 - 1  # num_heads * 128 is an int32


def front_arguments(
    arguments: dict[str, Any], abstract: bool = False
) -> tuple[FrontConfig, list[Any]]:
    """Checks the arguments of one `index_front` call, by name.

    Returns the call's static facts and the primitive's operands. `abstract` admits
    `jax.ShapeDtypeStruct`s for arrays.
    """
    arrays = {name: arguments[name] for name in ARRAYS}
    for name in ("key", "head_weights"):
        if arrays[name] is None:
            arrays[name] = arrays["projected"]
    name_of_format = cache_format(arguments["cache_format"])
    _arrays(arrays, abstract, row=ROW_BYTES[name_of_format])
    for name in ("projected", "q_norm", "wq_b", "key"):
        _dtype(name, arrays[name], "bfloat16")
    for name in ("key_norm_weight", "key_norm_bias"):
        _dtype(name, arrays[name], "float32")
    _dtype("head_weights", arrays["head_weights"], *FLOATS)
    _dtype("slots", arrays["slots"], *INTEGERS)

    heads, latent = _heads_and_latent(arrays["wq_b"].shape)
    batch, width = arrays["projected"].shape
    if width < latent:
        raise ValueError(
            f"projected must have at least K = wq_b.shape[-1] = {latent} columns, got {width}"
        )
    _width("q_norm", arrays["q_norm"], latent, "K = wq_b.shape[-1]")
    _width("key_norm_weight", arrays["key_norm_weight"], HEAD_DIM, "the width of a key")
    _width("key_norm_bias", arrays["key_norm_bias"], HEAD_DIM, "the width of a key")
    _cache(arrays["cache"], name_of_format)
    for name in ("slots", "key", "head_weights"):
        _rows(name, arrays[name], batch, "projected")

    key_offset = _integer("key_offset", arguments["key_offset"], 0)
    _fits("key_offset", key_offset, "128", HEAD_DIM, "key", arrays["key"])
    num_heads = arguments["num_heads"]
    num_heads = _integer("num_heads", heads if num_heads is None else num_heads, heads, MAX_HEADS)
    first_head, head_start_operand = _index("head_start", arguments["head_start"], num_heads - heads + 1)
    weight_offset = _integer("weight_offset", arguments["weight_offset"], 0)
    if first_head is None:  # traced: any shard's
        used, columns = "num_heads", num_heads
    else:
        used, columns = "head_start + H", first_head + heads
    _fits("weight_offset", weight_offset, used, columns, "head_weights", arrays["head_weights"])

    layers = _stack_length({name: arrays[name] for name in STACKABLE})
    own_layer, layer_operand = _layer(arguments["layer"], layers)
    weight_scale = arguments["weight_scale"]
    if weight_scale is None:
        weight_scale = (num_heads * HEAD_DIM) ** -0.5
    config = FrontConfig(
        key_offset=key_offset,
        weight_offset=weight_offset,
        eps=_positive_float("eps", arguments["eps"]),
        key_eps=_positive_float("key_eps", arguments["key_eps"]),
        cache_format=name_of_format,
        weights_dtype=_weights_dtype(arguments["weights_dtype"]),
        num_heads=num_heads,
        head_start=first_head,
        layer=own_layer,
        weight_scale=_positive_float("weight_scale", weight_scale),
        implementation=_implementation(arguments["implementation"]),
        has_layer_operand=layer_operand is not None,
        has_head_start_operand=head_start_operand is not None,
    )
    arrays["slots"] = _narrow("slots", arrays["slots"], arrays["cache"])
    scalars = [x for x in (layer_operand, head_start_operand) if x is not None]
    return config, [*arrays.values(), *scalars]


def reader_arguments(cache: Any, slots: Any, layer: Any, format_name: str) -> tuple[Any, Any]:
    """Checks one `read_keys` call; returns slots and layer as operands."""
    _arrays({"cache": cache}, row=ROW_BYTES[cache_format(format_name)])
    _cache(cache, format_name)
    _array("slots", slots)
    _dtype("slots", slots, *INTEGERS)
    return _narrow("slots", slots, cache), _reader_layer(layer, cache)


def scorer_arguments(
    arrays: dict[str, Any], query_scale: Any, layer: Any, format_name: str
) -> tuple[Any, Any]:
    """Checks one `index_scores` call; returns block_table and layer as operands.

    `arrays` holds query, weights, cache, block_table and context_lens.
    """
    four_bit = cache_format(format_name) == "mxfp4"
    columns = HEAD_DIM // 2 if four_bit else HEAD_DIM
    if four_bit:
        arrays = {**arrays, "query_scale": query_scale}
    elif query_scale is not None:
        raise ValueError(
            f"query_scale must be None with cache_format={format_name!r}, where the scale is part "
            f"of weights, got {type(query_scale).__name__}"
        )
    _arrays(arrays, row=ROW_BYTES[format_name], columns=columns)
    query, cache = arrays["query"], arrays["cache"]
    _dtype("query", query, "uint8" if four_bit else "float8_e4m3fn")
    _dtype("weights", arrays["weights"], *FLOATS)
    _width("query", query, columns, f"the packed width of a head in {format_name}")
    _cache(cache, format_name)
    for name in ("block_table", "context_lens"):
        _dtype(name, arrays[name], *INTEGERS)
        _rows(name, arrays[name], query.shape[0], "query")
    for name in ("weights", "query_scale") if four_bit else ("weights",):
        if arrays[name].shape != query.shape[:2]:
            raise ValueError(
                f"{name} must have shape (B, H) = query.shape[:2] = {query.shape[:2]}, "
                f"got {arrays[name].shape}"
            )
    if four_bit:
        _dtype("query_scale", query_scale, "uint32")
    return _narrow("block_table", arrays["block_table"], cache), _reader_layer(layer, cache)


def cache_format(value: Any) -> str:
    """The name of a known cache format."""
    return _choice("cache_format", value, ROW_BYTES)


def positive_int(name: str, value: Any) -> int:
    """A Python or NumPy int of at least 1."""
    return _integer(name, value, 1)


def _choice(name: str, value: Any, known: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in known:
        names = ", ".join(f'"{x}"' for x in known)
        raise ValueError(f"{name} must be one of {names}, got {value!r}")
    return value


def _array(name: str, value: Any, abstract: bool = False) -> None:
    if not (isinstance(value, CONCRETE) or (abstract and isinstance(value, jax.ShapeDtypeStruct))):
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(value).__name__}")


def _arrays(arrays: dict[str, Any], abstract: bool = False, **sizes: int) -> None:
    """Types and ranks."""
    for name, value in arrays.items():
        _array(name, value, abstract)
        if len(value.shape) not in SHAPES[name]:
            expected = " or ".join(SHAPES[name].values()).format(**sizes)
            raise ValueError(f"{name} must have shape {expected}, got {value.shape}")


def _dtype(name: str, value: Any, *allowed: str) -> None:
    if value.dtype.name not in allowed:
        raise TypeError(f"{name} must have dtype {' or '.join(allowed)}, got {value.dtype.name}")


def _width(name: str, value: Any, expected: int, meaning: str) -> None:
    if value.shape[-1] != expected:
        raise ValueError(
            f"{name} must be {expected} wide ({meaning}) in its last axis, got {value.shape}"
        )


def _rows(name: str, value: Any, batch: Any, other: str) -> None:
    if value.shape[0] != batch:
        raise ValueError(f"{name} must have as many rows as {other} ({batch}), got {value.shape}")


def _fits(offset: str, first: int, used: str, columns: int, name: str, array: Any) -> None:
    width = array.shape[1]
    if first + columns > width:
        raise ValueError(
            f"{offset} + {used} must be at most the width of {name}, {width}, "
            f"got {first} + {columns}"
        )


def _heads_and_latent(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, latent = shape[-2:]
    if rows == 0 or rows % HEAD_DIM:
        raise ValueError(f"wq_b must have H*128 rows for H >= 1 heads, got {rows} in {shape}")
    if latent == 0 or latent % HEAD_DIM:
        raise ValueError(f"K = wq_b.shape[-1] must be a positive multiple of 128, got {latent}")
    return rows // HEAD_DIM, latent


def _cache(cache: Any, format_name: str) -> None:
    _dtype("cache", cache, "uint8")
    row = ROW_BYTES[format_name]
    _width("cache", cache, row, f"bytes per token of cache_format={format_name!r}")
    pages, page_size = cache.shape[-3:-1]
    if not (1 <= pages <= MAX_PAGES and 1 <= page_size <= MAX_PAGE_SIZE):
        raise ValueError(
            f"cache must have 1 to {MAX_PAGES} pages of 1 to {MAX_PAGE_SIZE} tokens, "
            f"got {cache.shape}"
        )


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a Python int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {rule}, got {value}")
    return int(value)


def _positive_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (float, int, np.floating, np.integer)):
        raise TypeError(f"{name} must be a Python float, got {type(value).__name__}")
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(value)
    if not (np.isfinite(rounded) and rounded > 0):
        raise ValueError(f"{name} must be positive and finite in float32, got {value}")
    return float(value)


def _weights_dtype(value: Any) -> str:
    try:
        name = "None" if value is None else jnp.dtype(value).name
    except TypeError:
        name = repr(value)
    return _choice("weights_dtype", name, WEIGHTS_DTYPES)


def _implementation(value: Any) -> str | None:
    return None if value is None else _choice("implementation", value, IMPLEMENTATIONS)


def _stack_length(stackable: dict[str, Any]) -> dict[str, int]:
    """L of each stacked operand, all equal; empty if none is stacked."""
    stacked = {k: v.shape[0] for k, v in stackable.items() if len(v.shape) > STACKABLE[k]}
    if len(set(stacked.values())) > 1 or 0 in stacked.values():
        got = ", ".join(f"{name} with L = {length}" for name, length in stacked.items())
        raise ValueError(f"stacked operands must share one L >= 1, got {got}")
    return stacked


def _layer(layer: Any, stacked: dict[str, int]) -> tuple[int | None, Any]:
    """`layer` as a static int or as an operand; (None, None) where nothing is stacked."""
    if not stacked:
        if layer is not None:
            raise ValueError(f"layer must be left out where no operand is stacked, got {layer}")
        return None, None
    length = next(iter(stacked.values()))
    if layer is None:
        raise ValueError(
            f"layer is required because of stacked {', '.join(stacked)} (L = {length}), got None"
        )
    return _index("layer", layer, length)


def _reader_layer(layer: Any, cache: Any) -> Any:
    static, operand = _layer(layer, _stack_length({"cache": cache}))
    return operand if static is None else np.int32(static)


def _index(name: str, value: Any, size: int) -> tuple[int | None, Any]:
    """An int in [0, size) as it is, or an integer scalar array as an int32 operand."""
    if isinstance(value, (bool, int, np.generic)):
        return _integer(name, value, 0, size - 1), None
    if not isinstance(value, (*CONCRETE, jax.ShapeDtypeStruct)):
        raise TypeError(f"{name} must be an int or an integer scalar, got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must have an integer dtype, got {value.dtype.name}")
    if value.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
    return None, _int32_index(value, size)


def _int32_index(value: Any, size: int) -> Any:
    """The scalar as int32; what 32 bits cannot hold stays out of [0, size) on its side."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((), np.int32)
    if isinstance(value, np.ndarray):
        return np.int32(min(max(int(value), -1), size))
    if value.dtype.itemsize < 4 or value.dtype == np.int32:
        return value.astype(np.int32)
    low = 0 if jnp.issubdtype(value.dtype, np.unsignedinteger) else -1
    return jnp.clip(value, low, size).astype(np.int32)


def _narrow(name: str, indices: Any, cache: Any) -> Any:
    """NumPy int64 indices as int32 where JAX would cut off their upper half.

    What int32 cannot hold becomes -1, which is out of range as it was.
    """
    if not isinstance(indices, np.ndarray) or indices.dtype != np.int64:
        return indices
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return indices
    wide = indices >= 2**31
    pages, page_size = cache.shape[-3:-1]
    if np.any(wide & (indices < pages * page_size)):
        raise ValueError(f"{name} must be below 2**31 unless jax_enable_x64 is on, got {indices}")
    return np.where(wide | (indices < 0), -1, indices).astype(np.int32)
