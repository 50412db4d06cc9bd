"""The operator behind `index_front`: its CUDA call's operands and attributes, and when it fits."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_dsa_front._cache import HEAD_DIM, ROW_BYTES
from jax_dsa_front._front.config import FrontConfig
from jax_dsa_front._front.reference import reference_front
from jax_dsa_front._operator import CudaCall, Operator, shielded
from jax_dsa_front._runtime import library, variants

PROJECTED, WQ_B, CACHE = 0, 2, 5  # operand positions
CACHE_RESULT = 2


def _latent(operands: Sequence[Any]) -> int:
    return operands[WQ_B].shape[-1]


def _known_batch(operands: Sequence[Any]) -> int:
    """The batch; a symbolic one counts as 1, which every kernel takes."""
    batch = operands[PROJECTED].shape[0]
    return batch if isinstance(batch, int) else 1


def _misfit(_: FrontConfig, operands: Sequence[Any], arch: str) -> str | None:
    heads, pitch = operands[WQ_B].shape[-2] // HEAD_DIM, operands[PROJECTED].shape[1]
    batch = _known_batch(operands)
    return variants.front_unsupported(_latent(operands), pitch, arch, heads, batch)


def _idle(_: FrontConfig, operands: Sequence[Any]) -> str | None:
    return "there is nothing to compute at B = 0" if _known_batch(operands) == 0 else None


def _slower(_: FrontConfig, operands: Sequence[Any], arch: str) -> str | None:
    batch = _known_batch(operands)
    return f"at B = {batch}" if variants.front_jnp_is_faster(arch, batch) else None


def _fits(_: FrontConfig, operands: Sequence[Any]) -> str:
    return f"K = {_latent(operands)} and P = {operands[PROJECTED].shape[1]}"


def _lower(ctx: Any, operands: Sequence[Any], config: FrontConfig) -> Sequence[Any]:
    avals = ctx.avals_in
    traced = config.has_layer_operand + 2 * config.has_head_start_operand
    rule = jax.ffi.ffi_lowering(library.INDEX_FRONT, operand_output_aliases={CACHE: CACHE_RESULT})
    # One more result than the primitive has: scratch for the normalised rows, which the handler
    # uses where it takes two launches.
    scratch = avals[PROJECTED].update(shape=(avals[PROJECTED].shape[0], _latent(avals)))
    # No barrier for wq_b: a copy of one layer of it takes longer than the call
    others = shielded([*operands[:WQ_B], *operands[WQ_B + 1 :]])
    *results, _ = rule(
        ctx.replace(avals_out=[*ctx.avals_out, scratch]),
        *(*others[:WQ_B], operands[WQ_B], *others[WQ_B:]),
        key_offset=np.int32(config.key_offset),
        weight_offset=np.int32(config.weight_offset),
        eps=np.float32(config.eps),
        key_eps=np.float32(config.key_eps),
        cache_format=np.int32(list(ROW_BYTES).index(config.cache_format)),
        weight_scale=np.float32(config.weight_scale),
        num_heads=np.int32(config.num_heads),
        head_start=np.int32(config.head_start or 0),
        layer=np.int32(config.layer or 0),
        traced=np.int32(traced),
    )
    return shielded(results)


OPERATOR = Operator(
    "index_front",
    reference_front,
    fold="projected, slots, and key and head_weights if given",
    cuda=CudaCall(
        lower=_lower,
        key=lambda _, operands: _latent(operands),
        misfit=_misfit,
        idle=_idle,
        slower=_slower,
        fits=_fits,
    ),
)
