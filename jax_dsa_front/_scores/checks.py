"""Argument checks of `index_scores`: every message names argument, rule, expected and got."""

from typing import Any

from jax_dsa_front import _cache, _rules
from jax_dsa_front._cache import HEAD_DIM, ROW_BYTES
from jax_dsa_front._scores.config import ARRAYS, ScoresConfig

SHAPES = {  # by rank
    "query": {3: "(B, H, {columns})"},
    "weights": {2: "(B, H)"},
    **_cache.SHAPES,
    "context_lens": {1: "(B,)"},
    "query_scale": {2: "(B, H)"},
}
FRONT_AS_QUERY = (
    "query must be an array, got the result of index_front whole: pass front.query, "
    "front.query_scale, front.weights, front.cache, which are *front"
)


def scores_arguments(
    arguments: dict[str, Any], abstract: bool = False
) -> tuple[ScoresConfig, list[Any]]:
    """Checks the arguments of one `index_scores` call, by name.

    Returns the call's static facts and the primitive's operands. `abstract` admits
    `jax.ShapeDtypeStruct`s for arrays.
    """
    if isinstance(arguments["query"], tuple):
        raise TypeError(FRONT_AS_QUERY)
    cache_format = _cache.check_format(arguments["cache_format"])
    arrays = {name: arguments[name] for name in ARRAYS}
    four_bit = cache_format == "mxfp4"
    columns = HEAD_DIM // 2 if four_bit else HEAD_DIM
    query_scale = arguments["query_scale"]
    if four_bit:
        if query_scale is None:
            raise TypeError(
                "query_scale must be an array with cache_format='mxfp4', where the scales are a "
                "result of their own, got None"
            )
        arrays["query_scale"] = query_scale
    elif query_scale is not None:
        raise ValueError(
            f"query_scale must be None with cache_format={cache_format!r}, where the scale is part "
            f"of weights, got {type(query_scale).__name__}"
        )
    _rules.arrays(arrays, SHAPES, abstract, row=ROW_BYTES[cache_format], columns=columns)
    query, cache, block_table = arrays["query"], arrays["cache"], arrays["block_table"]
    _rules.dtype("query", query, "uint8" if four_bit else "float8_e4m3fn")
    _rules.dtype("weights", arrays["weights"], *_rules.FLOATS)
    _rules.width("query", query, columns, f"the packed width of a head in {cache_format}")
    _cache.check_cache(cache, cache_format)
    _cache.check_block_table(block_table, cache.shape[-2], query.shape[0], "query")
    _rules.rows("context_lens", arrays["context_lens"], query.shape[0], "query")
    for name in ("weights", "query_scale") if four_bit else ("weights",):
        if arrays[name].shape != query.shape[:2]:
            raise ValueError(
                f"{name} must have shape (B, H) = query.shape[:2] = {query.shape[:2]}, "
                f"got {arrays[name].shape}"
            )
    if four_bit:
        _rules.dtype("query_scale", query_scale, "uint32")
    arrays["block_table"] = _rules.indices("block_table", block_table, cache.shape[-3])
    arrays["context_lens"] = _rules.lengths("context_lens", arrays["context_lens"])
    layer, operand = _rules.layer(
        arguments["layer"], {"cache": cache}, _cache.RANK, SHAPES, abstract
    )
    config = ScoresConfig(
        cache_format=cache_format,
        layer=layer,
        implementation=_rules.implementation(arguments["implementation"]),
        has_layer_operand=operand is not None,
    )
    return config, [*arrays.values(), *([] if operand is None else [operand])]
