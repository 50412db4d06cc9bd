"""A stand-in for `cuda.bindings.driver`: enough of it to load cubins where there is no GPU.

It answers like the driver of a machine with as many devices as it has compute capabilities: unknown
symbols are not found, an image that is no ELF file and more shared memory than an SM has are
refused. Nothing can be launched, but for what `entry_points` has addresses of.
"""

import ctypes
import enum
import sys
import types

MAX_SHARED_BYTES = 232448  # that one CTA may use, on sm_90


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NOT_FOUND = 500


class Names:
    """An enumeration of the driver: every member is its own name."""

    def __getattr__(self, name):
        return name


def structure():
    """A driver structure whose members appear as they are used, to any depth."""

    class Members(types.SimpleNamespace):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            setattr(self, name, Members())
            return getattr(self, name)

    return Members()


class FakeDriver:
    CUresult = CUresult
    CUdevice_attribute = CUfunction_attribute = CUlaunchAttributeID = Names()
    CUlaunchAttribute = CUlaunchConfig = staticmethod(structure)

    def __init__(
        self,
        version=13000,
        capabilities=((9, 0),) * 8,
        init_error=None,
        clusters_per_wave=66,
        entry_points=(),
    ):
        self.version, self.capabilities, self.init_error = version, capabilities, init_error
        self.clusters_per_wave, self.entry_points = clusters_per_wave, dict(entry_points)
        self.contexts = 0  # pushed and not popped
        self.images = []

    def install(self):
        """From here on `import cuda.bindings.driver` finds this one."""
        sys.modules["cuda.bindings.driver"] = self
        return self

    def cuInit(self, flags):  # noqa: N802
        if isinstance(self.init_error, Exception):
            raise self.init_error
        return (self.init_error or CUresult.CUDA_SUCCESS,)

    def cuDriverGetVersion(self):  # noqa: N802
        return CUresult.CUDA_SUCCESS, self.version

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetAttribute(self, which, device):  # noqa: N802
        if which.endswith("MULTIPROCESSOR_COUNT"):
            return CUresult.CUDA_SUCCESS, 132
        return CUresult.CUDA_SUCCESS, self.capabilities[device][which.endswith("MINOR")]

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return CUresult.CUDA_SUCCESS, "context"

    def cuCtxPushCurrent(self, context):  # noqa: N802
        self.contexts += 1
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self):  # noqa: N802
        self.contexts -= 1
        return CUresult.CUDA_SUCCESS, "context"

    def cuLibraryLoadData(self, image, *_):  # noqa: N802
        if not image.startswith(b"\x7fELF"):
            return CUresult.CUDA_ERROR_INVALID_IMAGE, None
        self.images.append(image)
        return CUresult.CUDA_SUCCESS, len(self.images) - 1

    def cuLibraryGetKernel(self, library, symbol):  # noqa: N802
        if b"\0" + symbol + b"\0" not in self.images[library]:
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        return CUresult.CUDA_SUCCESS, 1 + library

    def cuKernelSetAttribute(self, which, value, kernel, device):  # noqa: N802
        too_much = "SHARED_SIZE" in which and value > MAX_SHARED_BYTES
        return (CUresult.CUDA_ERROR_INVALID_VALUE if too_much else CUresult.CUDA_SUCCESS,)

    def cuKernelGetFunction(self, kernel):  # noqa: N802
        return CUresult.CUDA_SUCCESS, kernel

    def cuOccupancyMaxActiveClusters(self, function, config):  # noqa: N802
        return CUresult.CUDA_SUCCESS, self.clusters_per_wave

    def cuGetProcAddress(self, name, version, flags):  # noqa: N802
        return CUresult.CUDA_SUCCESS, self.entry_points.get(name, 0), 0


class RecordedLaunches:
    """Installs a driver whose launches do nothing but be remembered.

    `launched` holds (handle of the kernel, number of tensor maps in front of its parameters);
    `orders` the parameters' offsets from the first one, in the order of the launch. Set
    `parameters` to the structure that is launched with.
    """

    def __init__(self, **driver):
        self.launched, self.orders, self.parameters = [], set(), None
        integers, pointers = [ctypes.c_int] * 2, [ctypes.c_void_p] * 5
        launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        encode = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, *integers, *pointers, *integers, *integers
        )
        self.functions = {  # kept: the handler remembers their addresses
            b"cuLaunchKernelEx": launch(self.remember),
            b"cuTensorMapEncodeTiled": encode(lambda *_: 0),
        }
        addresses = {n: ctypes.cast(f, ctypes.c_void_p).value for n, f in self.functions.items()}
        FakeDriver(entry_points=addresses, **driver).install()

    def remember(self, config, handle, arguments, extra):
        addresses, start = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)), 0
        while addresses[start] != ctypes.addressof(self.parameters):
            start += 1
        self.launched.append((handle, start))
        count = len(self.parameters._fields_)
        offsets = (addresses[start + i] - addresses[start] for i in range(count))
        self.orders.add(tuple(offsets))
        return 0

    def fields(self):
        """[(name, bytes)] of the parameters, whose order is that of every launch so far."""
        fields = [
            (name, getattr(type(self.parameters), name)) for name, _ in self.parameters._fields_
        ]
        assert self.orders == {tuple(field.offset for _, field in fields)}, self.orders
        return [(name, field.size) for name, field in fields]
