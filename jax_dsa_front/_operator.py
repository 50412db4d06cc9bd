"""What every operator shares: a JAX primitive with a jnp form and, where it has one, a CUDA call.

All semi-public JAX (`jax.extend`, `jax.interpreters`) is imported here and nowhere else.

An operator is one equation in a jaxpr. On CUDA it becomes one custom call or the jnp form; on every
other platform the jnp form. The choice is made while lowering, because only then the platform is
known.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jax
import jax.export
from jax.interpreters import ad, batching, mlir, xla

from jax_dsa_front._runtime import library, variants

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:  # the same class; importing jax.extend takes longer than the rest of this package
    Primitive = type(jax.lax.add_p)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation of an operator runs, and why."""

    implementation: Literal["cuda", "jnp"]
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class CudaCall:
    """An operator's kernels: when they fit, and the custom call that launches them.

    `config` is the call's static facts, `avals` anything with a shape for each operand.
    """

    lower: Callable[[mlir.LoweringRuleContext, Sequence[Any], Any], Sequence[Any]]
    """The results of the custom call, as values of the program."""
    key: Callable[[Any, Sequence[Any]], int]
    """What its kernels are loaded by."""
    misfit: Callable[[Any, Sequence[Any], str], str | None]
    """One sentence why no kernel of an architecture takes such a call; None if one does."""
    idle: Callable[[Any, Sequence[Any]], str | None]
    """Why there is nothing to launch, if so."""
    slower: Callable[[Any, Sequence[Any], str], str | None]
    """On what the kernel of an architecture is not known to be the faster one, if so."""
    fits: Callable[[Any, Sequence[Any]], str]
    """What the kernel takes, for `explain`."""


class Operator:
    """One primitive: `bind` puts it into a program, `choose` says what it becomes there.

    name       of the public function, in messages and jaxprs
    jnp_form   (config, *operands, on_cuda=...) -> results, in plain JAX
    fold       the operands that a mapped axis is to be folded into, in words
    cuda       its kernels, if it has some
    config     a call's static facts: hashable, with an attribute `implementation`
    """

    def __init__(
        self,
        name: str,
        jnp_form: Callable[..., Sequence[jax.Array]],
        fold: str,
        cuda: CudaCall | None = None,
    ) -> None:
        self.name, self.fold, self.cuda = name, fold, cuda
        # Under jit, so that equal calls of one program are traced once and share one function
        self._jnp_form = jax.jit(jnp_form, static_argnums=0, static_argnames="on_cuda")
        self._result_avals = functools.lru_cache(maxsize=1024)(self._results)
        primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        primitive.def_abstract_eval(self._abstract_eval)
        mlir.register_lowering(primitive, self._lower_elsewhere)
        mlir.register_lowering(primitive, self._lower_for_cuda, platform="cuda")
        ad.primitive_jvps[primitive] = self._not_differentiable
        ad.primitive_transposes[primitive] = self._not_differentiable
        batching.primitive_batchers[primitive] = self._not_batchable
        self._primitive = primitive

    def bind(self, config: Any, operands: Sequence[Any]) -> list[jax.Array]:
        """The results for operands that have been checked."""
        return self._primitive.bind(*operands, config=config)

    # The choice ------------------------------------------------------------------------------

    def choose_on_cuda(
        self, config: Any, operands: Sequence[Any], warn: bool = False
    ) -> Explanation:
        """The implementation that a program lowered for CUDA takes for operands of these shapes.

        The CUDA lowering and `explain` both ask here. The lowering does not know its device: the
        kernel is taken if it can run on every local CUDA device, and is the faster one on each.
        Without such a device the program is meant for another machine; then it is taken if that
        holds for some architecture. `operands` are anything with a shape; a symbolic batch takes
        the kernel. `warn`: where the kernel would have been taken, but the machine lacks what it
        needs.

        Raises NotImplementedError if `implementation="cuda"` cannot be had.
        """
        if config.implementation == "jnp":
            return Explanation("jnp", 'implementation="jnp" asks for it')
        local = tuple(sorted(set(library.local_cuda_architectures())))
        obstacle = self._misfit(config, operands, local)
        if self.cuda is not None and obstacle is None:
            cuda = self.cuda
            if (idle := cuda.idle(config, operands)) is not None:
                return Explanation("jnp", idle)
            archs = local or variants.ARCHITECTURES
            slow = {a: why for a in archs if (why := cuda.slower(config, operands, a)) is not None}
            if config.implementation is None and (slow if local else len(slow) == len(archs)):
                on = f"on {', '.join(slow)} the kernel is not known to be faster"
                return Explanation("jnp", f"{on} {next(iter(slow.values()))}")
            if local:
                obstacle = library.missing(self.name, cuda.key(config, operands))
                if warn and obstacle is not None and config.implementation is None:
                    text = f"{self.name} runs without its kernel: {obstacle}"
                    warnings.warn(text, stacklevel=3)
            if obstacle is None:
                where = "on the device that the program is lowered for"
                if local:
                    where = f"on {', '.join(local)}"
                takes = f"a shipped kernel takes {cuda.fits(config, operands)} {where}"
                return Explanation("cuda", takes)
        if config.implementation == "cuda":
            raise NotImplementedError(f'implementation="cuda" cannot run: {obstacle}')
        assert obstacle is not None
        return Explanation("jnp", obstacle)

    def choose_elsewhere(self, config: Any, platform: str) -> Explanation:
        """The same for a platform other than CUDA: there is only the jnp form."""
        if config.implementation == "jnp":
            return Explanation("jnp", 'implementation="jnp" asks for it')
        reason = self._no_kernel()
        if reason is None:
            reason = library.missing() or "this program is not compiled for CUDA"
        if config.implementation == "cuda":
            raise NotImplementedError(
                f'implementation="cuda" cannot run on {platform}: {reason}; '
                "leave implementation out to run anywhere"
            )
        return Explanation("jnp", f"on {platform} it is the only one ({reason})")

    def _no_kernel(self) -> str | None:
        return f"{self.name} has no kernel yet" if self.cuda is None else None

    def _misfit(self, config: Any, operands: Sequence[Any], local: tuple[str, ...]) -> str | None:
        """Why the call suits some local device not; without one, why it suits no architecture."""
        if self.cuda is None:
            return self._no_kernel()
        archs = local or variants.ARCHITECTURES
        reasons = [self.cuda.misfit(config, operands, arch) for arch in archs]
        misfits = [reason for reason in reasons if reason is not None]
        return misfits[0] if misfits and (local or len(misfits) == len(archs)) else None

    # What the primitive becomes --------------------------------------------------------------

    def _abstract_eval(self, *avals: Any, config: Any) -> list[Any]:
        # What the jnp form's results are depends on the mesh around the call, too
        return list(self._result_avals(config, avals, jax.sharding.get_abstract_mesh()))

    def _results(self, config: Any, avals: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        """Shapes, dtypes and mesh axes of the results: whatever the jnp form has for such
        operands."""
        refuse_explicit_axes(self.name, *avals)
        form = functools.partial(self._jnp_form, config)
        return tuple(jax.make_jaxpr(form)(*avals).out_avals)

    def _lower_jnp_form(self, ctx: Any, operands: Sequence[Any], config: Any, on_cuda: bool) -> Any:
        form = functools.partial(self._jnp_form, config, on_cuda=on_cuda)
        return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)

    def _lower_elsewhere(self, ctx: mlir.LoweringRuleContext, *operands: Any, config: Any) -> Any:
        if config.implementation == "cuda":
            # Raises. Others must not come here: to look for what is missing looks for the driver.
            self.choose_elsewhere(config, "/".join(ctx.platforms or ctx.module_context.platforms))
        return self._lower_jnp_form(ctx, operands, config, on_cuda=False)

    def _lower_for_cuda(self, ctx: mlir.LoweringRuleContext, *operands: Any, config: Any) -> Any:
        choice = self.choose_on_cuda(config, ctx.avals_in, warn=True)
        if self.cuda is None or choice.implementation == "jnp":
            return self._lower_jnp_form(ctx, operands, config, on_cuda=True)
        return self.cuda.lower(ctx, operands, config)

    # What it refuses -------------------------------------------------------------------------

    def _not_differentiable(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} cannot be differentiated: it is for inference; apply "
            "jax.lax.stop_gradient to its inputs if it is part of a differentiated function"
        )

    def _not_batchable(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} cannot be mapped with vmap: fold the mapped axis into the batch of one "
            f"call ({self.fold}), which is also the fast form"
        )


def refuse_explicit_axes(name: str, *avals: Any) -> None:
    """Raises NotImplementedError if an operand, of which `avals` are the types, is split over
    explicit mesh axes."""
    for aval in avals:
        if any(axis is not None for axis in aval.sharding.spec):
            raise NotImplementedError(
                f"{name} does not partition itself, but got an operand {aval.str_short()} on "
                "explicit mesh axes: call it inside jax.shard_map, where every operand is local"
            )


# Custom calls -------------------------------------------------------------------------------------


def shielded(values: Sequence[Any]) -> Sequence[Any]:
    """The values behind a barrier that XLA's optimisations do not cross; no kernel comes of it.

    XLA's GPU compiler takes slices in front of a custom call, and updates of slices behind it, into
    the call ("dynamic-slice fusion"). Where a scan stacks a result that its body reads too, JAX
    0.11 then runs the call twice a step, once on a copy of the cache; and where the layers of a
    cache are a scan's inputs and outputs, the cache's operand and result become two buffers. Small
    operands would save a copy of some KB, but may begin where the kernel cannot read them, and
    where a loop slices them, XLA records its CUDA graph again in each step.
    """
    types = [value.type for value in values]
    return mlir.ir.Operation.create("stablehlo.optimization_barrier", types, values).results


def export_safety_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs for programs lowered for CUDA.

    JAX exports custom calls only on request. Ours may be: their attributes name no kernel, and each
    target's name carries a version that changes with the meaning of operands or attributes.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in library.TARGETS]


# explain ------------------------------------------------------------------------------------------

# Public function -> (its operator, its argument checks with a keyword `abstract`)
_explained: dict[Callable[..., Any], tuple[Operator, Callable[..., tuple[Any, list[Any]]]]] = {}


def explains(operator: Operator, checks: Callable[..., tuple[Any, list[Any]]]) -> Any:
    """Decorates an operator's public function, so that `explain` takes it.

    `checks` makes (config, operands) of the function's arguments by name."""

    def decorate(function: Callable[..., Any]) -> Any:
        _explained[function] = operator, checks
        return function

    return decorate


def explain(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says which implementation an operator would run with these arguments, and why.

    `operator` is `index_front` or `index_scores`; behind it come the arguments of its call, in
    which `jax.ShapeDtypeStruct`s do for arrays. The answer is for CUDA if this process has a CUDA
    device in JAX, else for its default platform. Nothing is compiled, allocated or launched.
    `str()` of the result is one readable line.

    Raises what the call would raise, NotImplementedError for an impossible "cuda" included, and
    TypeError if `operator` is anything else, a jitted or partial one included.
    """
    if not inspect.isfunction(operator) or operator not in _explained:
        known = ", ".join(f"jax_dsa_front.{function.__name__}" for function in _explained)
        raise TypeError(
            f"explain takes an operator first, one of {known}, as it is (not jitted, not partial), "
            f"and then its arguments, got {type(operator).__name__}"
        )
    own, checks = _explained[operator]
    try:
        bound = inspect.signature(operator).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain takes the arguments of {own.name}: {error}") from None
    bound.apply_defaults()
    config, operands = checks(bound.arguments, abstract=True)
    concrete = [x for x in operands if not isinstance(x, jax.ShapeDtypeStruct)]
    refuse_explicit_axes(own.name, *map(jax.typeof, concrete))
    if library.local_cuda_architectures():
        return own.choose_on_cuda(config, operands)
    return own.choose_elsewhere(config, jax.default_backend())
