"""Rules for single arguments, with their messages: argument, rule, what was expected, what came."""

from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

CONCRETE = (jax.Array, np.ndarray)  # tracers are jax.Arrays


def choice(name: str, value: Any, known: Iterable[str], otherwise: str = "") -> str:
    """One of the known names; `otherwise` says what the caller takes besides."""
    if not isinstance(value, str) or value not in known:
        names = ", ".join(f'"{x}"' for x in known)
        raise ValueError(f"{name} must be {otherwise}one of {names}, got {value!r}")
    return value


def array(name: str, value: Any, abstract: bool = False) -> None:
    if not _is_array(value, abstract):
        got = type(value).__name__
        if isinstance(value, jax.Ref):
            got = "a reference: pass what it holds, ref[...]"
        raise TypeError(f"{name} must be a JAX or NumPy array, got {got}")


def _is_array(value: Any, abstract: bool) -> TypeGuard[Any]:
    return isinstance(value, (*CONCRETE, jax.ShapeDtypeStruct) if abstract else CONCRETE)


def dtype(name: str, value: Any, *allowed: str) -> None:
    if value.dtype.name not in allowed:
        raise TypeError(f"{name} must have dtype {' or '.join(allowed)}, got {value.dtype.name}")


def width(name: str, value: Any, expected: int, meaning: str) -> None:
    if value.shape[-1] != expected:
        raise ValueError(
            f"{name} must be {expected} wide ({meaning}) in its last axis, got {value.shape}"
        )


def rows(name: str, value: Any, batch: Any, other: str) -> None:
    if value.shape[0] != batch:
        raise ValueError(f"{name} must have as many rows as {other} ({batch}), got {value.shape}")


def integer(
    name: str, value: Any, low: int, high: int | None = None, meaning: str | None = None
) -> int:
    """A Python int from `low` to `high`; `meaning` says where these come from."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name} must be a Python int, known while tracing, got {type(value).__name__}"
        )
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        rule += "" if meaning is None else f" ({meaning})"
        raise ValueError(f"{name} must be {rule}, got {value}")
    return int(value)


def positive_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (float, int, np.floating, np.integer)):
        raise TypeError(
            f"{name} must be a Python float, known while tracing, got {type(value).__name__}"
        )
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


def index(
    name: str, value: Any, size: int, meaning: str | None = None, abstract: bool = False
) -> tuple[int | None, Any]:
    """An int in [0, size) as it is, or an integer scalar array as an int32 operand."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return integer(name, value, 0, size - 1, meaning), None
    if not _is_array(value, abstract):
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
