"""The JAX primitive behind `index_front`: shapes, lowerings, and the transforms that it refuses.

All semi-public JAX (`jax.extend`, `jax.interpreters`) is imported here and nowhere else.

`index_front` is one equation in a jaxpr. On CUDA it becomes one custom call with the cache aliased
onto its result, or the jnp form; on every other platform the jnp form. The choice is made while
lowering, because only then the platform is known.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jax
import jax.export
import numpy as np
from jax.interpreters import ad, batching, mlir, xla

from jax_dsa_front import _runtime, _variants
from jax_dsa_front._config import HEAD_DIM, ROW_BYTES, FrontConfig
from jax_dsa_front._reference import reference_front

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:  # the same class; importing jax.extend takes longer than the rest of this package
    Primitive = type(jax.lax.add_p)

TARGET = _runtime.TARGET
PROJECTED, WQ_B, CACHE = 0, 2, 5  # operand positions
CACHE_RESULT = 2

index_front_p = Primitive("index_front")
index_front_p.multiple_results = True
index_front_p.def_impl(functools.partial(xla.apply_primitive, index_front_p))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation of `index_front` runs, and why."""

    implementation: Literal["cuda", "jnp"]
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


def choose_on_cuda(config: FrontConfig, operands: Sequence[Any], warn: bool = False) -> Explanation:
    """The implementation that a program lowered for CUDA takes for operands of these shapes.

    The CUDA lowering and `explain` both ask here. The lowering does not know its device: the kernel
    is taken if it can run on every local CUDA device, and is the faster one on each. Without such a
    device the program is meant for another machine; then it is taken if that holds for some
    architecture. `operands` are anything with a shape; a symbolic batch takes the kernel. `warn`:
    where the kernel would have been taken, but the machine lacks what it needs.

    Raises NotImplementedError if `implementation="cuda"` cannot be had.
    """
    if config.implementation == "jnp":
        return Explanation("jnp", 'implementation="jnp" asks for it')
    batch, pitch = operands[PROJECTED].shape
    rows, latent = operands[WQ_B].shape[-2:]
    local = tuple(sorted(set(_runtime.local_cuda_architectures())))
    known = batch if isinstance(batch, int) else 1
    obstacle = _misfit(latent, pitch, rows // HEAD_DIM, known, local)
    if obstacle is None:
        if known == 0:
            return Explanation("jnp", "there is nothing to compute at B = 0")
        archs = local or _variants.ARCHITECTURES
        slow = [arch for arch in archs if _variants.jnp_is_faster(arch, known)]
        if config.implementation is None and (slow if local else slow == [*archs]):
            reason = f"on {', '.join(slow)} the kernel is not known to be faster at B = {batch}"
            return Explanation("jnp", reason)
        obstacle = _runtime.missing(latent) if local else None
        if warn and obstacle is not None and config.implementation is None:
            warnings.warn(f"index_front runs without its kernel: {obstacle}", stacklevel=3)
    if obstacle is not None:
        if config.implementation == "cuda":
            raise NotImplementedError(f'implementation="cuda" cannot run: {obstacle}')
        return Explanation("jnp", obstacle)
    where = f"on {', '.join(local)}" if local else "on the device that the program is lowered for"
    return Explanation("cuda", f"a shipped kernel takes K = {latent} and P = {pitch} {where}")


def choose_elsewhere(config: FrontConfig, platform: str) -> Explanation:
    """The same for a platform other than CUDA: there is only the jnp form."""
    if config.implementation == "jnp":
        return Explanation("jnp", 'implementation="jnp" asks for it')
    reason = _runtime.missing() or "this program is not compiled for CUDA"
    if config.implementation == "cuda":
        raise NotImplementedError(
            f'implementation="cuda" cannot run on {platform}: {reason}; '
            "leave implementation out to run anywhere"
        )
    return Explanation("jnp", f"on {platform} it is the only one ({reason})")


def _misfit(latent: int, pitch: int, heads: int, batch: int, local: tuple[str, ...]) -> str | None:
    """Why the shapes suit some local device not; without one, why they suit no architecture."""
    archs = local or _variants.ARCHITECTURES
    reasons = [_variants.unsupported(latent, pitch, arch, heads, batch) for arch in archs]
    misfits = [reason for reason in reasons if reason is not None]
    return misfits[0] if misfits and (local or len(misfits) == len(archs)) else None


def export_safety_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs for programs lowered for CUDA.

    JAX exports custom calls only on request. Ours may be: its attributes name no kernel, and its
    target name carries a version that changes with the meaning of operands or attributes.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


@index_front_p.def_abstract_eval
def _abstract_eval(*avals: Any, config: FrontConfig) -> list[Any]:
    return list(_result_avals(config, avals))


@functools.lru_cache(maxsize=1024)
def _result_avals(config: FrontConfig, avals: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes, dtypes and mesh axes of the results: whatever the jnp form has for such operands."""
    for aval in avals:
        if any(axis is not None for axis in aval.sharding.spec):
            raise NotImplementedError(
                f"index_front does not partition itself, but got an operand {aval.str_short()} on "
                "explicit mesh axes: call it inside jax.shard_map, where every operand is local"
            )
    return tuple(jax.make_jaxpr(functools.partial(_jnp_form, config))(*avals).out_avals)


_jnp_form = jax.jit(reference_front, static_argnums=0, static_argnames="isolate_layers")
"""Under jit, so that equal calls of one program are traced once and share one function."""


def _lower_jnp_form(ctx: Any, operands: Sequence[Any], config: FrontConfig, cuda: bool) -> Any:
    form = functools.partial(_jnp_form, config, isolate_layers=not cuda)
    return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)


def _default_lowering(ctx: mlir.LoweringRuleContext, *operands: Any, config: FrontConfig) -> Any:
    if config.implementation == "cuda":
        # Raises. Others must not come here: to look for what is missing initialises the driver.
        choose_elsewhere(config, "/".join(ctx.platforms or ctx.module_context.platforms))
    return _lower_jnp_form(ctx, operands, config, cuda=False)


def _cuda_lowering(ctx: mlir.LoweringRuleContext, *operands: Any, config: FrontConfig) -> Any:
    avals: Sequence[Any] = ctx.avals_in
    if choose_on_cuda(config, avals, warn=True).implementation == "jnp":
        return _lower_jnp_form(ctx, operands, config, cuda=True)
    traced = config.has_layer_operand + 2 * config.has_head_start_operand
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases={CACHE: CACHE_RESULT})
    # One more result than the primitive has: scratch for the normalised rows, which the handler
    # uses where it takes two launches.
    rows = avals[PROJECTED].shape[0], avals[WQ_B].shape[-1]
    scratch = avals[PROJECTED].update(shape=rows)
    shielded = _shielded([*operands[:WQ_B], *operands[WQ_B + 1 :]])
    *results, _ = rule(
        ctx.replace(avals_out=[*ctx.avals_out, scratch]),
        *(*shielded[:WQ_B], operands[WQ_B], *shielded[WQ_B:]),
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
    return _shielded(results)


def _shielded(values: Sequence[Any]) -> Sequence[Any]:
    """The values behind a barrier that XLA's optimisations do not cross; no kernel comes of it.

    XLA's GPU compiler takes slices in front of a custom call, and updates of slices behind it, into
    the call ("dynamic-slice fusion"). Where a scan stacks a result that its body reads too, JAX
    0.11 then runs the call twice a step, once on a copy of the cache; and where the layers of a
    cache are a scan's inputs and outputs, the cache's operand and result become two buffers. Small
    operands would save a copy of some KB, but may begin where the kernel cannot read them, and
    where a loop slices them, XLA records its CUDA graph again in each step. `wq_b` has no barrier:
    a copy of one layer of it takes longer than the call.
    """
    types = [value.type for value in values]
    return mlir.ir.Operation.create("stablehlo.optimization_barrier", types, values).results


def _not_differentiable(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "index_front cannot be differentiated: it is for inference; apply jax.lax.stop_gradient "
        "to its inputs if it is part of a differentiated function"
    )


def _not_batchable(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "index_front cannot be mapped with vmap: fold the mapped axis into the batch of one call "
        "(projected, slots, and key and head_weights if given), which is also the fast form"
    )


mlir.register_lowering(index_front_p, _default_lowering)
mlir.register_lowering(index_front_p, _cuda_lowering, platform="cuda")
ad.primitive_jvps[index_front_p] = _not_differentiable
ad.primitive_transposes[index_front_p] = _not_differentiable
batching.primitive_batchers[index_front_p] = _not_batchable
