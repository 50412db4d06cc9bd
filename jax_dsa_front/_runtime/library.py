"""The handler library and the driver: registration with JAX, and what a machine lacks.

Importing this module opens the small handler library and nothing else: no driver, no CUDA package,
no backend.  loader.py loads the kernels."""

import atexit
import ctypes
import functools
import hashlib
import importlib
import os
import re
import struct
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jax_dsa_front._runtime import variants
from jax_dsa_front._runtime.files import built

LIBRARY = built("libjax_dsa_front.so")
INDEX_FRONT = "jax_dsa_front.index_front.v1"
INDEX_SCORES = "jax_dsa_front.index_scores.v1"
# The calls that programs may hold, and the C functions behind them. A target's name carries the
# version of its operands and attributes; one that was ever exported is served for ever.
TARGETS = {INDEX_FRONT: "JaxDsaFrontIndexFront{}", INDEX_SCORES: "JaxDsaFrontIndexScores{}"}
STAGES = ("Initialize", "Execute")
# As cuDriverGetVersion counts: CUDA 12.4, whose XLA records custom calls into graphs
MINIMUM_DRIVER = 12040


def _only_copy() -> ModuleType:
    """A mark of this copy for the process. Two copies, also the same one imported anew, would
    register two handlers under one name, which breaks JAX's backends."""
    here = str(Path(__file__).parents[1])
    mark = sys.modules.setdefault("_jax_dsa_front_copy", ModuleType(here))
    if mark.__name__ != here:
        raise ImportError(
            f"jax_dsa_front is already loaded in this process, from {mark.__name__}; "
            f"the copy at {here} cannot be imported beside it"
        )
    if hasattr(mark, "registered"):
        raise ImportError(
            f"jax_dsa_front was imported from {here} in this process before, and what JAX has of "
            "it cannot be exchanged; restart Python to import it anew"
        )
    return mark


_mark = _only_copy()


NOT_BUILT = "the package was not built (its {} missing): pip install it, or leave the source tree"


class KernelUnavailableError(RuntimeError):
    """One sentence why a kernel cannot be loaded on this machine."""


# C functions of the handler library
SYMBOLS = (
    *("JaxDsaFrontFfiMinor", "JaxDsaFrontSetLoader", "JaxDsaFrontPublish", "JaxDsaFrontClose"),
    *(symbol.format(stage) for symbol in TARGETS.values() for stage in (*STAGES, "Launch")),
)
_registration_error: str | None = "jax_dsa_front was not imported as a package"
handler: ctypes.CDLL | None = None
"""The registered handler library."""


# Registration -------------------------------------------------------------------------------------


def register(load: Any) -> None:
    """Opens the handler library and registers it with JAX for CUDA; remembers why not where it
    cannot. `load` is the C callback that the library asks for kernels."""
    global handler, _registration_error
    _mark.registered = True  # type: ignore[attr-defined]
    if not LIBRARY.exists():
        _give_up(NOT_BUILT.format("handler library is"), silently=not variants.MANIFEST.exists())
        return
    try:
        opened = _opened(LIBRARY)
    except OSError as error:
        _give_up(f"the handler library cannot be loaded ({error}); reinstall jax_dsa_front")
        return
    spoken, accepted = opened.JaxDsaFrontFfiMinor(), _accepted_ffi_minor()
    if accepted is not None and spoken > accepted:
        # XLA would refuse it silently on CUDA: "No FFI handler registered" at the first compilation
        _give_up(
            f"the handler speaks XLA FFI 0.{spoken}, the installed jaxlib only 0.{accepted}; "
            "install a newer jaxlib, or build jax_dsa_front against this one"
        )
        return
    opened.JaxDsaFrontSetLoader.argtypes = [ctypes.c_void_p]
    opened.JaxDsaFrontPublish.argtypes = [
        *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ]
    for target, symbol in TARGETS.items():
        stages = {
            stage.lower(): jax.ffi.pycapsule(getattr(opened, symbol.format(stage)))
            for stage in STAGES
        }
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")
    opened.loader = load  # type: ignore[attr-defined]  # called also when its module is gone
    opened.JaxDsaFrontSetLoader(ctypes.cast(load, ctypes.c_void_p))
    atexit.register(opened.JaxDsaFrontClose)
    # A forked child has none of the parent's threads, so it must not wait for a load of theirs.
    os.register_at_fork(after_in_child=lambda: atexit.unregister(opened.JaxDsaFrontClose))
    handler, _registration_error = opened, None


def _give_up(reason: str, silently: bool = False) -> None:
    """Remembers why nothing is registered; in a source tree silently. Else with a warning at the
    import: a program that was lowered elsewhere would end in a message of XLA's."""
    global _registration_error
    _registration_error = reason
    if not silently:
        warnings.warn(f"jax_dsa_front has no kernels in this process: {reason}", stacklevel=4)


def _opened(path: Path) -> ctypes.CDLL:
    """The shared library. Raises OSError if it is not whole: the system would map a truncated one,
    and end the process where it touches what is not there."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) == 64 and header.startswith(b"\x7fELF"):
        # e_shoff, e_shentsize and e_shnum of a 64-bit header: the section headers end the file
        (start,) = struct.unpack_from("<Q", header, 0x28)
        each, count = struct.unpack_from("<HH", header, 0x3A)
        if path.stat().st_size < start + each * count:
            raise OSError(f"{path} is truncated")
    opened = ctypes.CDLL(str(path))
    lacks = [name for name in SYMBOLS if not hasattr(opened, name)]
    if lacks:
        raise OSError(f"{path} has no {lacks[0]}")
    return opened


def registration_error() -> str | None:
    """Why the handler is not registered with JAX; None if it is."""
    return _registration_error


def _accepted_ffi_minor() -> int | None:
    """The newest FFI minor version that the installed jaxlib takes; None if its headers are not
    there."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        lines = header.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[2]) for line in lines if line.startswith("#define XLA_FFI_API_MINOR ")),
        None,
    )


# What is there ------------------------------------------------------------------------------------


def missing(operator: str | None = None, key: int | None = None) -> str | None:
    """One sentence naming what this process lacks to run an operator's kernels of one key, or all
    kernels; None if nothing.

    Driver and devices come first: whoever has none of them need not install anything."""
    if _registration_error is not None:
        return _registration_error
    try:
        manifest_entries()
        architectures = local_cuda_architectures()
        if not architectures:
            return _no_cuda_device()
        bindings()
        _look_at_cubins(architectures, operator, key)
    except KernelUnavailableError as error:
        return str(error)
    return None


def _no_cuda_device() -> str:
    """Why JAX has none, as far as one can see without starting the driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1)"
    return "JAX sees no CUDA device in this process"


@functools.cache
def _look_at_cubins(architectures: tuple[str, ...], operator: str | None, key: int | None) -> None:
    """Raises if one is not whole: a call that fails when it is loaded may have taken a donated
    cache with it. Takes 1 ms, the first time."""
    for entry in manifest_entries():
        asked = operator in (None, entry["operator"]) and key in (None, entry["key"])
        if asked and entry["arch"] in architectures:
            cubin(entry)


def cubin(entry: dict[str, Any]) -> bytes:
    """The file that an entry of the manifest describes."""
    path = variants.CUBINS / f"{entry['name']}.cubin"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise KernelUnavailableError(
            f"{path.name} cannot be read ({error.strerror}); reinstall jax_dsa_front"
        ) from error
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise KernelUnavailableError(
            f"{path.name} is not the file that the manifest describes; reinstall jax_dsa_front"
        )
    return content


def manifest_entries() -> list[dict[str, Any]]:
    """The manifest's entries; they decide how much memory a launch gets, so not one may differ."""
    try:
        return variants.manifest()["kernels"]
    except FileNotFoundError as error:
        raise KernelUnavailableError(NOT_BUILT.format("cubins are")) from error
    except OSError as error:
        raise KernelUnavailableError(
            f"the manifest of the cubins cannot be read ({error}); reinstall jax_dsa_front"
        ) from error
    except ValueError as error:
        raise KernelUnavailableError(str(error)) from error


@functools.cache
def local_cuda_architectures() -> tuple[str, ...]:
    """The target of each local CUDA device of JAX, e.g. ("sm_90a",); empty where JAX has no CUDA
    backend."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()
    capabilities = [
        tuple(map(int, str(device.compute_capability).split("."))) for device in devices
    ]
    return tuple(variants.architecture((major, minor)) for major, minor in capabilities)


def bindings() -> ModuleType:
    """cuda-python's driver bindings, initialised."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KernelUnavailableError(
            "cuda-python is missing: install jax_dsa_front with its extra cuda13 (or cuda12), "
            'from its source tree with pip install ".[cuda13]"'
        ) from error
    try:
        check(driver, driver.cuInit(0))
    except (RuntimeError, OSError) as error:
        reason = re.split(r"\.?\s*\n|\.\s|\.$", str(error), maxsplit=1)[0]  # its first sentence
        raise KernelUnavailableError(
            f"the NVIDIA driver (libcuda) cannot be used ({reason})"
        ) from error
    version = check(driver, driver.cuDriverGetVersion())
    if version < MINIMUM_DRIVER:
        has, wanted = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MINIMUM_DRIVER))
        raise KernelUnavailableError(
            f"the NVIDIA driver is too old: it supports CUDA {has}, needed is {wanted}"
        )
    return driver


def check(driver: ModuleType, result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or its error as an exception."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        way_out = ""
        if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
            way_out = (
                ": leave it memory, with a lower XLA_CLIENT_MEM_FRACTION "
                "(or XLA_PYTHON_CLIENT_MEM_FRACTION, where that is set)"
            )
        raise KernelUnavailableError(f"the driver answered {status.name}{way_out}")
    return values[0] if len(values) == 1 else values or None
