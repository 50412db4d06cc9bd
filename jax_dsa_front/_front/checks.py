"""Argument checks of `index_front`: every message names argument, rule, expected and got."""

from itertools import pairwise
from typing import Any

import jax.numpy as jnp

from jax_dsa_front import _cache, _rules
from jax_dsa_front._cache import HEAD_DIM, ROW_BYTES
from jax_dsa_front._front.config import ARRAYS, STACKABLE, WEIGHTS_DTYPES, FrontConfig

SHAPES = {  # by rank
    "projected": {2: "(B, P)"},
    "q_norm": {1: "(K,)", 2: "(L, K)"},
    "wq_b": {2: "(H*128, K)", 3: "(L, H*128, K)"},
    "key_norm_weight": {1: "(128,)", 2: "(L, 128)"},
    "key_norm_bias": {1: "(128,)", 2: "(L, 128)"},
    **_cache.SHAPES,
    "key": {2: "(B, >= key_offset + 128)"},
    "head_weights": {2: "(B, >= weight_offset + H)"},
}
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
    cache_format = _cache.check_format(arguments["cache_format"])
    _rules.arrays(arrays, SHAPES, abstract, row=ROW_BYTES[cache_format])
    for name in ("projected", "q_norm", "wq_b", "key"):
        _rules.dtype(name, arrays[name], "bfloat16")
    for name in ("key_norm_weight", "key_norm_bias"):
        _rules.dtype(name, arrays[name], "float32")
    _rules.dtype("head_weights", arrays["head_weights"], *_rules.FLOATS)

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
    _cache.check_cache(arrays["cache"], cache_format)
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

    ranges = {"q_a": (0, latent)}
    if arguments["key"] is None:
        ranges["key"] = (key_offset, key_offset + HEAD_DIM)
    if arguments["head_weights"] is None:
        ranges["head_weights"] = (weight_offset + (first_head or 0), weight_offset + columns)
    _apart(ranges)
    stackable = {name: arrays[name] for name in STACKABLE}
    own_layer, layer_operand = _rules.layer(
        arguments["layer"], stackable, STACKABLE, SHAPES, abstract
    )
    weight_scale = arguments["weight_scale"]
    if weight_scale is None:
        weight_scale = (num_heads * HEAD_DIM) ** -0.5
    config = FrontConfig(
        key_offset=key_offset,
        weight_offset=weight_offset,
        eps=_rules.positive_float("eps", arguments["eps"]),
        key_eps=_rules.positive_float("key_eps", arguments["key_eps"]),
        cache_format=cache_format,
        weights_dtype=_weights_dtype(arguments["weights_dtype"]),
        num_heads=num_heads,
        head_start=first_head,
        layer=own_layer,
        weight_scale=_rules.positive_float("weight_scale", weight_scale),
        implementation=_rules.implementation(arguments["implementation"]),
        has_layer_operand=layer_operand is not None,
        has_head_start_operand=head_start_operand is not None,
    )
    arrays["slots"] = _cache.check_slots(arrays["slots"], arrays["cache"])
    scalars = [x for x in (layer_operand, head_start_operand) if x is not None]
    return config, [*arrays.values(), *scalars]


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


def _apart(ranges: dict[str, tuple[int, int]]) -> None:
    """Columns of `projected` that belong to parts which nobody gave an array of their own."""
    if len(ranges) == 1:
        return
    ordered = sorted((span, part) for part, span in ranges.items())
    for ((start, end), first), ((begin, stop), second) in pairwise(ordered):
        if begin < end:
            argument = second if first == "q_a" else first
            raise ValueError(
                "key_offset and weight_offset must leave each part of projected columns of its "
                f"own, got {first} in {start}..{end - 1} and {second} in {begin}..{stop - 1}; if "
                f"that is meant, pass {argument}=projected"
            )


def _heads_and_latent(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, latent = shape[-2:]
    if rows == 0 or rows % HEAD_DIM:
        raise ValueError(f"wq_b must have H*128 rows for H >= 1 heads, got {rows} in {shape}")
    if latent == 0 or latent % HEAD_DIM:
        raise ValueError(f"K = wq_b.shape[-1] must be a positive multiple of 128, got {latent}")
    return rows // HEAD_DIM, latent


def _weights_dtype(value: Any) -> str:
    try:
        name = "None" if value is None else jnp.dtype(value).name
    except TypeError:
        name = str(value)
    return _rules.choice("weights_dtype", name, WEIGHTS_DTYPES)
