"""The cubins: cuda-python loads them, the handler launches.

XLA's INITIALIZE stage asks `load` for an operator's kernels of one key the first time that they are
needed on a device, also in a process that only runs programs lowered elsewhere."""

import _thread
import ctypes
import threading
import traceback
from types import ModuleType
from typing import Any

from jax_dsa_front._runtime import library, variants
from jax_dsa_front._runtime.library import KernelUnavailableError, check

# By operator, as in csrc_glue/kernel_table.h
SCHEDULES = {
    "index_front": ("split_n", "split_k", "split_k_rows", "row_norm"),
    "index_scores": ("paged", "paged_fp4"),
}


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


# Re-entrant: a signal handler may need kernels while this thread loads others
_load_lock = threading.RLock()
# Name of a variant -> CUlibrary, loaded once per process and never unloaded
_libraries: dict[str, Any] = {}


@ctypes.CFUNCTYPE(
    *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_int32),
)
def load(device: int, operator: int, key: int, message: int, message_bytes: int) -> int:
    """Called by the handler: publishes an operator's kernels of one key on a device; 1 with a
    sentence in `message` on failure."""
    try:
        with _load_lock:
            _publish(device, variants.OPERATORS[operator], key)
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


def _publish(device: int, operator: str, key: int) -> None:
    driver = library.bindings()
    attribute = driver.CUdevice_attribute
    handle = check(driver, driver.cuDeviceGet(device))
    major, minor = (
        check(driver, driver.cuDeviceGetAttribute(which, handle))
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    arch = variants.architecture((major, minor))
    reason = variants.unsupported(operator, key, arch)
    if reason is not None:
        raise KernelUnavailableError(
            f"CUDA device {device} cannot run this program: {reason}; "
            'lower it with implementation="jnp"'
        )
    entries = [
        entry
        for entry in library.manifest_entries()
        if (entry["operator"], entry["arch"], entry["key"]) == (operator, arch, key)
    ]
    if not entries:
        asked = f"{operator} for {arch} and {variants.key_text(operator, key)}"
        raise KernelUnavailableError(
            f"the manifest has no kernel of {asked}; reinstall jax_dsa_front"
        )
    # XLA's own context, kept for the process's life
    context = check(driver, driver.cuDevicePrimaryCtxRetain(handle))
    check(driver, driver.cuCtxPushCurrent(context))
    try:
        kernels = (_Kernel * len(entries))(*(_kernel(driver, entry, handle) for entry in entries))
    finally:
        check(driver, driver.cuCtxPopCurrent())
    assert library.handler is not None
    names = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuGetErrorName")
    entry_points = [_entry_point(driver, name) for name in names]
    operator_number = variants.OPERATORS.index(operator)
    library.handler.JaxDsaFrontPublish(
        device, operator_number, key, kernels, len(entries), *entry_points
    )


def _kernel(driver: ModuleType, entry: dict[str, Any], device: Any) -> _Kernel:
    """Loads one cubin (once per process) and makes its kernel ready on `device`, whose context is
    current."""
    name = entry["name"]
    if name not in _libraries:
        cubin = library.cubin(entry)
        loaded = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
        _libraries[name] = check(driver, loaded)
    kernel = check(driver, driver.cuLibraryGetKernel(_libraries[name], entry["symbol"].encode()))
    attribute = driver.CUfunction_attribute
    for which, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, entry["shared_bytes"]),
        # All of the SM's memory that can be shared, so that two CTAs of split_n fit
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):
        check(driver, driver.cuKernelSetAttribute(which, value, kernel, device))
    # Loads the code now, never during a launch
    function = check(driver, driver.cuKernelGetFunction(kernel))
    return _Kernel(
        handle=int(kernel),
        schedule=SCHEDULES[entry["operator"]].index(entry["schedule"]),
        tile=entry["tile"],
        max_batch=entry.get("max_batch") or 0,
        threads=entry["threads"],
        cluster=entry["cluster"],
        shared_bytes=entry["shared_bytes"],
        clusters_per_wave=_clusters_per_wave(driver, function, entry, device),
    )


def _clusters_per_wave(
    driver: ModuleType, function: Any, entry: dict[str, Any], device: Any
) -> int:
    """How many clusters of this kernel the current device holds at once; without clusters, how many
    CTAs at one per SM."""
    if entry["cluster"] == 1:
        which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return check(driver, driver.cuDeviceGetAttribute(which, device))
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
    return check(driver, driver.cuOccupancyMaxActiveClusters(function, config))


def _entry_point(driver: ModuleType, name: str) -> int:
    address = check(driver, driver.cuGetProcAddress(name.encode(), 12000, 0))
    return int(address[0] if isinstance(address, list | tuple) else address)
