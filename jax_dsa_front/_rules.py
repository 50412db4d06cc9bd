"""Rules for single arguments, with their messages: argument, rule, what was expected, what came.

They look at shapes, dtypes and Python values only, never into a JAX array.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

INTEGERS = ("int32", "int64")
FLOATS = ("bfloat16", "float32")
INT32_MAX = 2**31 - 1

Shapes = Mapping[str, Mapping[int, str]]
"""Of each array argument the shapes that it may have, by rank, in the words of a message."""


def choice(name: str, value: Any, known: Iterable[str], otherwise: str = "") -> str:
    """One of the known names; `otherwise` says what the caller takes besides."""
    if not isinstance(value, str) or value not in known:
        names = ", ".join(f'"{x}"' for x in known)
        raise ValueError(f"{name} must be {otherwise}one of {names}, got {value!r}")
    return value


def implementation(value: Any) -> str | None:
    if value is None:
        return None
    return choice("implementation", value, ("cuda", "jnp"), otherwise="None or ")


# Arrays -------------------------------------------------------------------------------------------


def array(name: str, value: Any, abstract: bool = False) -> None:
    """A JAX or NumPy array whose elements JAX takes for what they are."""
    if isinstance(value, np.ndarray):
        _numpy_array(name, value)
    elif isinstance(value, jax.Array):  # tracers are jax.Arrays
        if value.dtype.itemsize == 8 and not isinstance(value, Tracer) and not _has_64_bits():
            raise TypeError(  # JAX would cut the values to their lower halves
                f"{name} must have a dtype that JAX has in its present mode, got an array of "
                f"{value.dtype.name} that was made while jax_enable_x64 was on: call under "
                "jax.enable_x64() as well, or narrow it there"
            )
    elif not (abstract and isinstance(value, jax.ShapeDtypeStruct)):
        got = type(value).__name__
        if isinstance(value, jax.Ref):
            got = "a reference: pass what it holds, ref[...]"
        raise TypeError(f"{name} must be a JAX or NumPy array, got {got}")


def _numpy_array(name: str, value: np.ndarray) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be an array without a mask, which JAX would drop, got a masked array: "
            "pass .filled(value), or .data"
        )
    if not value.dtype.isnative:
        raise TypeError(  # JAX's fast path would take the bytes as they lie
            f"{name} must have the byte order of this machine, got dtype {value.dtype.str}: "
            'convert it with .astype(value.dtype.newbyteorder("="))'
        )


def _has_64_bits() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def arrays(
    given: Mapping[str, Any], shapes: Shapes, abstract: bool = False, **sizes: object
) -> None:
    """Types and ranks; `sizes` fills the words of the shapes."""
    for name, value in given.items():
        array(name, value, abstract)
        if len(value.shape) not in shapes[name]:
            expected = " or ".join(shapes[name].values()).format(**sizes)
            hint = ""
            if expected.startswith("(B,") and len(value.shape) > max(shapes[name]):
                hint = ": fold the axes in front into B, with .reshape"
            raise ValueError(f"{name} must have shape {expected}, got {value.shape}{hint}")


def dtype(name: str, value: Any, *allowed: str) -> None:
    got = _dtype_name(value.dtype)
    if got in allowed:
        return
    hint = f": convert it with .astype(jnp.{allowed[0]})"
    if allowed[0] in ("float8_e4m3fn", "uint8", "uint32"):  # codes: a conversion would change them
        hint = ": these are codes: pass them as they came, or reinterpret their bytes with .view"
    elif got == "void16" and "bfloat16" in allowed:
        hint = ": NumPy read bfloat16 without ml_dtypes: reinterpret it with .view(jnp.bfloat16)"
    elif got.startswith("float8") or got.startswith("float4"):
        hint = ": quantised values mean nothing without their scales: multiply by these first"
    elif value.dtype.kind not in "iuf" and got != "bfloat16":
        hint = ""  # no conversion of a bool or of a key of random numbers is meant
    raise TypeError(f"{name} must have dtype {' or '.join(allowed)}, got {got}{hint}")


@functools.lru_cache(maxsize=128)
def _dtype_name(dtype: Any) -> str:
    return dtype.name  # which NumPy puts together anew, 2 us each time


def width(name: str, value: Any, expected: int, meaning: str) -> None:
    if value.shape[-1] != expected:
        raise ValueError(
            f"{name} must be {expected} wide ({meaning}) in its last axis, got {value.shape}"
        )


def rows(name: str, value: Any, batch: Any, other: str) -> None:
    if value.shape[0] != batch:
        raise ValueError(f"{name} must have as many rows as {other} ({batch}), got {value.shape}")


# Integers -----------------------------------------------------------------------------------------


def integer(
    name: str, value: Any, low: int, high: int | None = None, meaning: str | None = None
) -> int:
    """A Python int from `low` to `high`; `meaning` says where these come from."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a Python int, known while tracing, got {_static(value)}")
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        rule += "" if meaning is None else f" ({meaning})"
        raise ValueError(f"{name} must be {rule}, got {value}")
    return int(value)


def _static(value: Any) -> str:
    """The type of a value that is not static; for a traced one with what to do."""
    got = type(value).__name__
    if isinstance(value, Tracer):
        got += (
            ": jax.jit traces every argument that is not bound by functools.partial or named in "
            "static_argnames"
        )
    return got


def indices(name: str, value: Any, size: int) -> Any:
    """An int32 or int64 array of indices of `size` places, as JAX can hold it: what is outside of
    [0, size) stays outside. A place that lies past int32 is a ValueError where JAX has no int64."""
    narrow = _narrow(name, value, beyond=-1)
    if narrow is not value and np.any((value > INT32_MAX) & (value < size)):
        raise ValueError(f"{name} must be below 2**31 unless jax_enable_x64 is on, got {value}")
    return narrow


def lengths(name: str, value: Any) -> Any:
    """An int32 or int64 array of lengths, as JAX can hold it; none of them needs more."""
    return _narrow(name, value, beyond=INT32_MAX)


def _narrow(name: str, value: Any, beyond: int) -> Any:
    """Without jax_enable_x64 JAX would cut the upper half off NumPy's int64. So what int32 cannot
    hold becomes -1 below and `beyond` above."""
    dtype(name, value, *INTEGERS)
    if not isinstance(value, np.ndarray) or value.dtype != np.int64 or _has_64_bits():
        return value
    return np.where(value > INT32_MAX, beyond, np.maximum(value, -1)).astype(np.int32)


def index(
    name: str, value: Any, size: int, meaning: str | None = None, abstract: bool = False
) -> tuple[int | None, Any]:
    """An int in [0, size) as it is, or an integer scalar array as an int32 operand."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return integer(name, value, 0, size - 1, meaning), None
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise TypeError(f"{name} must be an int or an integer scalar, got {type(value).__name__}")
    array(name, value, abstract)
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


# Floats -------------------------------------------------------------------------------------------


def positive_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (float, int, np.floating, np.integer)):
        raise TypeError(f"{name} must be a Python float, known while tracing, got {_static(value)}")
    got = value
    try:
        with np.errstate(over="ignore", under="ignore"):
            rounded = np.float32(value)
    except OverflowError:  # of an int that no float can hold
        rounded, got = np.float32(np.inf), f"an int of {int(value).bit_length()} bits"
    # XLA on CPU takes subnormal numbers as zero, and a zero row then has no finite norm
    if not np.finfo(np.float32).tiny <= rounded < np.inf:
        raise ValueError(f"{name} must be positive, finite and normal in float32, got {got}")
    return float(value)


# Stacks of layers ---------------------------------------------------------------------------------


def _stack_length(stackable: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, int]:
    """L of each stacked operand, all equal; empty if none is. `ranks`: without the layers."""
    stacked = {k: v.shape[0] for k, v in stackable.items() if len(v.shape) > ranks[k]}
    if len(set(stacked.values())) > 1 or 0 in stacked.values():
        got = ", ".join(f"{name} with L = {length}" for name, length in stacked.items())
        raise ValueError(
            f"stacked operands must share one L >= 1, got {got} (one axis more than a layer has "
            "makes a stack)"
        )
    return stacked


def layer(
    value: Any,
    stackable: Mapping[str, Any],
    ranks: Mapping[str, int],
    shapes: Shapes,
    abstract: bool = False,
) -> tuple[int | None, Any]:
    """`layer` as a static int or as an operand; (None, None) where nothing is stacked."""
    stacked = _stack_length(stackable, ranks)
    if not stacked:
        if value is not None:
            raise ValueError(f"layer must be left out where no operand is stacked, got {value}")
        return None, None
    length = next(iter(stacked.values()))
    if value is None:
        one_layer = ", ".join(
            f"{name} {shapes[name][ranks[name]].format(row='R')}" for name in stacked
        )
        raise ValueError(
            f"layer is required because of stacked {', '.join(stacked)} (L = {length}); if that is "
            f"one layer, reshape to {one_layer}; got None"
        )
    return index("layer", value, length, f"stacks of L = {length}", abstract)
