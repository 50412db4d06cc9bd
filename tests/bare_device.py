"""Bare launches without JAX: buffers of exactly the size asked for, and which kernels ran."""

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bare import check

from jax_dsa_front._runtime import library, loader

LaunchFunction = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)  # cuLaunchKernelEx


class Launches:
    """Stands between handler and driver, to say afterwards which kernels were launched."""

    def __init__(self):
        self.names, self.handles = {}, []  # handle -> name; handles in the order of the launches
        self.callbacks = []  # the handler keeps the first one's address
        load, entry_point = loader._kernel, loader._entry_point

        def remembering(driver, entry, device):
            kernel = load(driver, entry, device)
            self.names[kernel.handle] = entry["name"]
            return kernel

        def intercepting(driver, name):
            address = entry_point(driver, name)
            return self.counted(address) if name == "cuLaunchKernelEx" else address

        loader._kernel, loader._entry_point = remembering, intercepting

    def counted(self, address):
        launch = LaunchFunction(address)

        def count(config, handle, arguments, extra):
            self.handles.append(handle)
            return launch(config, handle, arguments, extra)

        self.callbacks.append(LaunchFunction(count))
        return ctypes.cast(self.callbacks[-1], ctypes.c_void_p).value


class Device:
    """The first GPU, without JAX. Its buffers (0.3 GB in all) are never given back, so no address
    comes twice."""

    def __init__(self):
        self.driver = library.bindings()
        context = check(self.driver.cuDevicePrimaryCtxRetain(check(self.driver.cuDeviceGet(0))))
        check(self.driver.cuCtxSetCurrent(context))
        self.stream = check(self.driver.cuStreamCreate(0))  # waits for copies: not non-blocking

    def empty(self, nbytes):
        return int(check(self.driver.cuMemAlloc(nbytes)))

    def put(self, array):
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        check(self.driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def get(self, address, nbytes):
        array = np.empty(nbytes, np.uint8)
        check(self.driver.cuMemcpyDtoH(array.ctypes.data, address, nbytes))
        return array

    def wait(self):
        check(self.driver.cuStreamSynchronize(self.stream))
