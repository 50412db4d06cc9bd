"""The operator behind `index_scores`: its CUDA call's operands and attributes, and when it fits."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_dsa_front._cache import ROW_BYTES
from jax_dsa_front._operator import CudaCall, Operator, shielded
from jax_dsa_front._runtime import library, variants
from jax_dsa_front._scores.config import ScoresConfig
from jax_dsa_front._scores.reference import reference_scores

QUERY, CACHE, BLOCK_TABLE = 0, 2, 3  # operand positions


def _heads_and_page_size(operands: Sequence[Any]) -> tuple[int, int]:
    return operands[QUERY].shape[1], operands[CACHE].shape[-2]


def _key(config: ScoresConfig, operands: Sequence[Any]) -> int:
    heads, page_size = _heads_and_page_size(operands)
    return variants.scores_key(config.cache_format == "mxfp4", page_size, heads)


def _misfit(_: ScoresConfig, operands: Sequence[Any], arch: str) -> str | None:
    return variants.scores_unsupported(*_heads_and_page_size(operands), arch)


def _idle(_: ScoresConfig, operands: Sequence[Any]) -> str | None:
    for name, extent in (("B", operands[QUERY].shape[0]), ("N", operands[BLOCK_TABLE].shape[1])):
        if isinstance(extent, int) and extent == 0:
            return f"there is nothing to compute at {name} = 0"
    return None


def _fits(_: ScoresConfig, operands: Sequence[Any]) -> str:
    heads, page_size = _heads_and_page_size(operands)
    return f"H = {heads} and pages of {page_size} tokens"


def _lower(ctx: Any, operands: Sequence[Any], config: ScoresConfig) -> Sequence[Any]:
    rule = jax.ffi.ffi_lowering(library.INDEX_SCORES)
    results = rule(
        ctx,
        *shielded(operands),
        cache_format=np.int32(list(ROW_BYTES).index(config.cache_format)),
        layer=np.int32(config.layer or 0),
        traced=np.int32(config.has_layer_operand),
    )
    return shielded(results)


OPERATOR = Operator(
    "index_scores",
    reference_scores,
    fold="query, query_scale if given, weights, block_table and context_lens",
    cuda=CudaCall(
        lower=_lower,
        key=_key,
        misfit=_misfit,
        idle=_idle,
        slower=lambda *_: None,
        fits=_fits,
    ),
)
