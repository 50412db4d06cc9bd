"""The handler library and the cubins at run time: cuda-python loads, C++ launches.

Importing this module opens the small handler library and nothing else: no driver, no CUDA package,
no backend.  XLA's INITIALIZE stage asks `_load` for the kernels of a device and a K the first time
that they are needed there, also in a process that only runs programs lowered elsewhere."""

import _thread
import atexit
import ctypes
import functools
import hashlib
import importlib
import os
import re
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jax_dsa_front import _variants

LIBRARY = Path(__file__).parent / "libjax_dsa_front.so"
TARGET = "jax_dsa_front.index_front.v1"
# As cuDriverGetVersion counts: CUDA 12.4, whose XLA records custom calls into graphs
MINIMUM_DRIVER = 12040
SCHEDULES = ("split_n", "split_k", "split_k_rows", "row_norm")  # as in csrc_glue/kernel_table.h


class _Kernel(ctypes.Structure):
    """`Kernel` of csrc_glue/kernel_table.h."""

    _fields_ = (
        ("handle", ctypes.c_void_p),
        ("schedule", ctypes.c_int32),
        ("tile", ctypes.c_int32),
        ("max_batch", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("clusters_per_wave", ctypes.c_int32),
    )


def _refuse_second_copy() -> None:
    """Two copies would register two handlers under one name, which breaks JAX's backends."""
    here = str(Path(__file__).parent)
    first = sys.modules.setdefault("_jax_dsa_front_copy", ModuleType(here)).__name__
    if first != here:
        raise ImportError(
            f"jax_dsa_front is already loaded in this process, from {first}; "
            f"the copy at {here} cannot be imported beside it"
        )


_refuse_second_copy()


NOT_BUILT = "the package was not built (its {} missing): pip install it, or leave the source tree"


class KernelUnavailableError(RuntimeError):
    """One sentence why a kernel cannot be loaded on this machine."""


_registration_error: str | None = "jax_dsa_front was not imported as a package"
_library: ctypes.CDLL | None = None
# Re-entrant: a signal handler may need kernels while this thread loads others
_load_lock = threading.RLock()
# Name of a variant -> CUlibrary, loaded once per process and never unloaded
_libraries: dict[str, Any] = {}


# Registration -------------------------------------------------------------------------------------


def register() -> None:
    """Opens the handler library and registers it with JAX for CUDA; remembers why not where it
    cannot."""
    global _library, _registration_error
    if not LIBRARY.exists():
        _registration_error = NOT_BUILT.format("handler library is")
        return
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        _registration_error = (
            f"the handler library cannot be loaded ({error}); reinstall jax_dsa_front"
        )
        return
    built, accepted = library.JaxDsaFrontFfiMinor(), _accepted_ffi_minor()
    if accepted is not None and built > accepted:
        # XLA would refuse it silently on CUDA: "No FFI handler registered" at the first compilation
        _registration_error = (
            f"the handler speaks XLA FFI 0.{built}, the installed jaxlib only 0.{accepted}; "
            "install a newer jaxlib, or build jax_dsa_front against this one"
        )
        return
    library.JaxDsaFrontSetLoader.argtypes = [ctypes.c_void_p]
    library.JaxDsaFrontPublish.argtypes = [
        *(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(_Kernel), ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ]
    stages = {
        "initialize": jax.ffi.pycapsule(library.JaxDsaFrontInitialize),
        "execute": jax.ffi.pycapsule(library.JaxDsaFrontExecute),
    }
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")
    library.JaxDsaFrontSetLoader(ctypes.cast(_load, ctypes.c_void_p))
    atexit.register(library.JaxDsaFrontClose)
    # A forked child has none of the parent's threads, so it must not wait for a load of theirs.
    os.register_at_fork(after_in_child=lambda: atexit.unregister(library.JaxDsaFrontClose))
    _library, _registration_error = library, None


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


def missing() -> str | None:
    """One sentence naming what this process lacks to run the kernel; None if nothing."""
    if _registration_error is not None:
        return _registration_error
    if not _variants.MANIFEST.exists():
        return NOT_BUILT.format("cubins are")
    try:
        _driver()
    except KernelUnavailableError as error:
        return str(error)
    if not local_cuda_architectures():
        return "JAX sees no CUDA device in this process"
    return None


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
    return tuple(_variants.architecture((major, minor)) for major, minor in capabilities)


def _driver() -> ModuleType:
    """cuda-python's driver bindings, initialised."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise KernelUnavailableError(
            'cuda-python is missing: pip install "jax_dsa_front[cuda13]" (or [cuda12])'
        ) from error
    try:
        _check(driver, driver.cuInit(0))
    except (RuntimeError, OSError) as error:
        reason = re.split(r"\.?\s*\n|\.\s|\.$", str(error), maxsplit=1)[0]  # its first sentence
        raise KernelUnavailableError(
            f"the NVIDIA driver (libcuda) cannot be used ({reason})"
        ) from error
    version = _check(driver, driver.cuDriverGetVersion())
    if version < MINIMUM_DRIVER:
        has, wanted = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MINIMUM_DRIVER))
        raise KernelUnavailableError(
            f"the NVIDIA driver is too old: it supports CUDA {has}, needed is {wanted}"
        )
    return driver


def _check(driver: ModuleType, result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or its error as an exception."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelUnavailableError(f"the driver answered {status.name}")
    return values[0] if len(values) == 1 else values or None


# Loading ------------------------------------------------------------------------------------------


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
def _load(device: int, k: int, message: int, message_bytes: int) -> int:
    """Called by the handler: publishes the kernels of (device, k); 1 with a sentence in `message`
    on failure."""
    try:
        with _load_lock:
            _publish(device, k)
    except BaseException as error:  # nothing may pass through the C++ frames above
        if isinstance(error, KeyboardInterrupt):
            again = threading.Timer(0.1, _interrupt_main)  # when the C++ frames are gone
            again.daemon = True
            again.start()
        if isinstance(error, KernelUnavailableError):
            text = str(error)
        else:
            text = "".join(traceback.format_exception_only(error)).strip()
        encoded = f"jax_dsa_front could not load its kernels: {text}".encode()[: message_bytes - 1]
        encoded = encoded.decode(errors="ignore").encode()  # not in the middle of a character
        ctypes.memmove(message, encoded + b"\0", len(encoded) + 1)
        return 1
    return 0


def _interrupt_main() -> None:
    if threading.main_thread().is_alive():
        _thread.interrupt_main()


def _publish(device: int, k: int) -> None:
    driver = _driver()
    attribute = driver.CUdevice_attribute
    handle = _check(driver, driver.cuDeviceGet(device))
    major, minor = (
        _check(driver, driver.cuDeviceGetAttribute(which, handle))
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    arch = _variants.architecture((major, minor))
    reason = _variants.unsupported(k, 0, arch)
    if reason is not None:
        raise KernelUnavailableError(
            f"CUDA device {device} cannot run this program: {reason}; "
            'lower it with implementation="jnp"'
        )
    entries = [entry for entry in _manifest() if (entry["arch"], entry["k"]) == (arch, k)]
    if not entries:
        raise KernelUnavailableError(
            f"the manifest has no kernel for {arch} and K = {k}; reinstall jax_dsa_front"
        )
    # XLA's own context, kept for the process's life
    context = _check(driver, driver.cuDevicePrimaryCtxRetain(handle))
    _check(driver, driver.cuCtxPushCurrent(context))
    try:
        kernels = (_Kernel * len(entries))(*(_kernel(driver, entry, handle) for entry in entries))
    finally:
        _check(driver, driver.cuCtxPopCurrent())
    assert _library is not None
    names = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuGetErrorName")
    entry_points = [_entry_point(driver, name) for name in names]
    _library.JaxDsaFrontPublish(device, k, kernels, len(entries), *entry_points)


def _manifest() -> list[dict[str, Any]]:
    """The manifest's entries; they decide how much memory a launch gets, so not one may differ."""
    try:
        return _variants.manifest()["kernels"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KernelUnavailableError(
            "the manifest of the cubins is missing or damaged; reinstall jax_dsa_front"
        ) from error


def _kernel(driver: ModuleType, entry: dict[str, Any], device: Any) -> _Kernel:
    """Loads one cubin (once per process) and makes its kernel ready on `device`, whose context is
    current."""
    name = entry["name"]
    if name not in _libraries:
        cubin = _read_cubin(entry)
        _libraries[name] = _check(
            driver, driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
        )
    kernel = _check(driver, driver.cuLibraryGetKernel(_libraries[name], entry["symbol"].encode()))
    attribute = driver.CUfunction_attribute
    for which, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, entry["shared_bytes"]),
        # All of the SM's memory that can be shared, so that two CTAs of split_n fit
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):
        _check(driver, driver.cuKernelSetAttribute(which, value, kernel, device))
    function = _check(
        driver, driver.cuKernelGetFunction(kernel)
    )  # loads the code now, never during a launch
    return _Kernel(
        handle=int(kernel),
        schedule=SCHEDULES.index(entry["schedule"]),
        tile=entry["tile"],
        max_batch=entry["max_batch"] or 0,
        threads=entry["threads"],
        cluster=entry["cluster"],
        shared_bytes=entry["shared_bytes"],
        clusters_per_wave=_clusters_per_wave(driver, function, entry),
    )


def _read_cubin(entry: dict[str, Any]) -> bytes:
    path = _variants.CUBINS / f"{entry['name']}.cubin"
    try:
        cubin = path.read_bytes()
    except OSError as error:
        raise KernelUnavailableError(
            f"{path.name} cannot be read ({error.strerror}); reinstall jax_dsa_front"
        ) from error
    if hashlib.sha256(cubin).hexdigest() != entry["sha256"]:
        raise KernelUnavailableError(
            f"{path.name} is not the file that the manifest describes; reinstall jax_dsa_front"
        )
    return cubin


def _clusters_per_wave(driver: ModuleType, function: Any, entry: dict[str, Any]) -> int:
    """How many clusters of this kernel the current device holds at once."""
    if entry["cluster"] == 1:
        return 0  # row_norm: chosen with another kernel, never for its own grid
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = entry["cluster"]
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = entry["cluster"], 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = entry["threads"], 1, 1
    config.sharedMemBytes = entry["shared_bytes"]
    config.attrs, config.numAttrs = [cluster], 1
    return _check(driver, driver.cuOccupancyMaxActiveClusters(function, config))


def _entry_point(driver: ModuleType, name: str) -> int:
    address = _check(driver, driver.cuGetProcAddress(name.encode(), 12000, 0))
    return int(address[0] if isinstance(address, list | tuple) else address)
