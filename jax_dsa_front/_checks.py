"""Argument checks of the public functions: every message names argument, rule, expected and got.

They look at shapes, dtypes and Python values only, never into a JAX array.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa_front import _rules
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
INTEGERS = ("int32", "int64")
FLOATS = ("bfloat16", "float32")
ROW_WIDTHS = ", ".join(f"{name}: {width}" for name, width in ROW_BYTES.items())
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
        _rules.dtype(name, arrays[name], "bfloat16")
    for name in ("key_norm_weight", "key_norm_bias"):
        _rules.dtype(name, arrays[name], "float32")
    _rules.dtype("head_weights", arrays["head_weights"], *FLOATS)
    _rules.dtype("slots", arrays["slots"], *INTEGERS)

    heads, latent = _heads_and_latent(arrays["wq_b"].shape)
    batch, width = arrays["projected"].shape
    if width < latent:
        raise ValueError(
            f"projected must have at least K columns, where wq_b is (H*128, K) with K = {latent}, "
            f"got {width} and wq_b {arrays['wq_b'].shape}"
        )
    _rules.width("q_norm", arrays["q_norm"], latent, "K = wq_b.shape[-1]")
    _rules.width("key_norm_weight", arrays["key_norm_weight"], HEAD_DIM, "the width of a key")
    _rules.width("key_norm_bias", arrays["key_norm_bias"], HEAD_DIM, "the width of a key")
    _cache(arrays["cache"], name_of_format)
    for name in ("slots", "key", "head_weights"):
        _rules.rows(name, arrays[name], batch, "projected")

    key_offset = _rules.integer("key_offset", arguments["key_offset"], 0)
    _fits("key_offset", key_offset, "128", HEAD_DIM, "key", arguments, arrays)
    num_heads, is_shard = heads, arguments["num_heads"] is not None
    bound = "num_heads, the heads of all shards, is needed with head_start"
    if is_shard:
        num_heads = arguments["num_heads"]
        bound = f"num_heads - H = {num_heads} - {heads}"
    num_heads = _rules.integer(
        *("num_heads", num_heads, heads, MAX_HEADS), f"at least the heads of wq_b, H = {heads}"
    )
    first_head, head_start_operand = _rules.index(
        "head_start", arguments["head_start"], num_heads - heads + 1, bound, abstract
    )
    if head_start_operand is not None and not is_shard:  # it would be clamped to 0
        raise ValueError(f"head_start must be the int 0 ({bound}), got an array")
    weight_offset = _rules.integer("weight_offset", arguments["weight_offset"], 0)
    if first_head is None:  # traced: any shard's
        used, columns = "num_heads", num_heads
    else:
        used, columns = "head_start + H", first_head + heads
    _fits("weight_offset", weight_offset, used, columns, "head_weights", arguments, arrays)

    layers = _stack_length({name: arrays[name] for name in STACKABLE})
    own_layer, layer_operand = _layer(arguments["layer"], layers, abstract)
    weight_scale = arguments["weight_scale"]
    if weight_scale is None:
        weight_scale = (num_heads * HEAD_DIM) ** -0.5
    config = FrontConfig(
        key_offset=key_offset,
        weight_offset=weight_offset,
        eps=_rules.positive_float("eps", arguments["eps"]),
        key_eps=_rules.positive_float("key_eps", arguments["key_eps"]),
        cache_format=name_of_format,
        weights_dtype=_weights_dtype(arguments["weights_dtype"]),
        num_heads=num_heads,
        head_start=first_head,
        layer=own_layer,
        weight_scale=_rules.positive_float("weight_scale", weight_scale),
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
    _rules.array("slots", slots)
    _rules.dtype("slots", slots, *INTEGERS)
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
        if query_scale is None:
            raise TypeError(
                "query_scale must be an array with cache_format='mxfp4', where the scales are a "
                "result of their own, got None"
            )
        arrays = {**arrays, "query_scale": query_scale}
    elif query_scale is not None:
        raise ValueError(
            f"query_scale must be None with cache_format={format_name!r}, where the scale is part "
            f"of weights, got {type(query_scale).__name__}"
        )
    _arrays(arrays, row=ROW_BYTES[format_name], columns=columns)
    query, cache = arrays["query"], arrays["cache"]
    _rules.dtype("query", query, "uint8" if four_bit else "float8_e4m3fn")
    _rules.dtype("weights", arrays["weights"], *FLOATS)
    _rules.width("query", query, columns, f"the packed width of a head in {format_name}")
    _cache(cache, format_name)
    for name in ("block_table", "context_lens"):
        _rules.dtype(name, arrays[name], *INTEGERS)
        _rules.rows(name, arrays[name], query.shape[0], "query")
    for name in ("weights", "query_scale") if four_bit else ("weights",):
        if arrays[name].shape != query.shape[:2]:
            raise ValueError(
                f"{name} must have shape (B, H) = query.shape[:2] = {query.shape[:2]}, "
                f"got {arrays[name].shape}"
            )
    if four_bit:
        _rules.dtype("query_scale", query_scale, "uint32")
    return _narrow("block_table", arrays["block_table"], cache), _reader_layer(layer, cache)


def cache_format(value: Any) -> str:
    """The name of a known cache format."""
    return _rules.choice("cache_format", value, ROW_BYTES)


def _arrays(arrays: dict[str, Any], abstract: bool = False, **sizes: int) -> None:
    """Types and ranks."""
    for name, value in arrays.items():
        _rules.array(name, value, abstract)
        if len(value.shape) not in SHAPES[name]:
            expected = " or ".join(SHAPES[name].values()).format(**sizes)
            raise ValueError(f"{name} must have shape {expected}, got {value.shape}")


def _fits(
    offset: str, first: int, used: str, columns: int, name: str, given: dict, arrays: dict
) -> None:
    width = arrays[name].shape[1]
    if first + columns > width:
        owner = name if given[name] is not None else f"projected (no {name} is given)"
        raise ValueError(
            f"{offset} + {used} must be at most the width of {owner}, {width}, "
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
    _rules.dtype("cache", cache, "uint8")
    row = ROW_BYTES[format_name]
    what = f"bytes per token of cache_format={format_name!r} ({ROW_WIDTHS})"
    _rules.width("cache", cache, row, what)
    pages, page_size = cache.shape[-3:-1]
    if not (1 <= pages <= MAX_PAGES and 1 <= page_size <= MAX_PAGE_SIZE):
        raise ValueError(
            f"cache must have 1 to {MAX_PAGES} pages of 1 to {MAX_PAGE_SIZE} tokens, "
            f"got {cache.shape}"
        )


def _weights_dtype(value: Any) -> str:
    try:
        name = "None" if value is None else jnp.dtype(value).name
    except TypeError:
        name = str(value)
    return _rules.choice("weights_dtype", name, WEIGHTS_DTYPES)


def _implementation(value: Any) -> str | None:
    if value is None:
        return None
    return _rules.choice("implementation", value, IMPLEMENTATIONS, otherwise="None or ")


def _stack_length(stackable: dict[str, Any]) -> dict[str, int]:
    """L of each stacked operand, all equal; empty if none is stacked."""
    stacked = {k: v.shape[0] for k, v in stackable.items() if len(v.shape) > STACKABLE[k]}
    if len(set(stacked.values())) > 1 or 0 in stacked.values():
        got = ", ".join(f"{name} with L = {length}" for name, length in stacked.items())
        raise ValueError(f"stacked operands must share one L >= 1, got {got}")
    return stacked


def _layer(layer: Any, stacked: dict[str, int], abstract: bool = False) -> tuple[int | None, Any]:
    """`layer` as a static int or as an operand; (None, None) where nothing is stacked."""
    if not stacked:
        if layer is not None:
            raise ValueError(f"layer must be left out where no operand is stacked, got {layer}")
        return None, None
    length = next(iter(stacked.values()))
    if layer is None:
        one_layer = ", ".join(
            f"{name} {SHAPES[name][STACKABLE[name]].format(row='R')}" for name in stacked
        )
        raise ValueError(
            f"layer is required because of stacked {', '.join(stacked)} (L = {length}); if that is "
            f"one layer, reshape to {one_layer}; got None"
        )
    return _rules.index("layer", layer, length, f"stacks of L = {length}", abstract)


def _reader_layer(layer: Any, cache: Any) -> Any:
    static, operand = _layer(layer, _stack_length({"cache": cache}))
    return operand if static is None else np.int32(static)


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
