"""Faults while kernels are loaded, driven through the loader itself, with a stand-in driver."""

import ctypes
import shutil
import signal
import sys
import threading
import time

import pytest

import faults
from fake_driver import CUresult, FakeDriver
from jax_dsa_front._runtime import library, loader, variants

BUILT = variants.CUBINS
PREFIX = "jax_dsa_front could not load its kernels: "
FRONT = variants.OPERATORS.index("index_front")
TILES = [
    v.tile
    for v in variants.VARIANTS
    if (v.operator, v.arch, v.key) == ("index_front", "sm_90a", 1536)
]


class Published:
    """In the place of the handler library: remembers what it is told."""

    def __init__(self):
        self.calls = []

    def JaxDsaFrontPublish(self, device, operator, key, kernels, count, *_):  # noqa: N802
        assert operator == FRONT
        self.calls.append((device, key, [kernels[i].tile for i in range(count)]))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package's cubins that the loader uses, and nothing loaded yet."""
    folder = tmp_path / "package"
    shutil.copytree(BUILT, folder / "cubins")
    monkeypatch.setattr(variants, "CUBINS", folder / "cubins")
    monkeypatch.setattr(variants, "MANIFEST", folder / "cubins" / "manifest.json")
    monkeypatch.setattr(loader, "_libraries", {})
    monkeypatch.setattr(library, "handler", Published())
    forget()
    yield folder
    forget()


def forget():
    """What this process knows of the package's files."""
    variants.manifest.cache_clear()
    library._look_at_cubins.cache_clear()


@pytest.fixture
def driver(monkeypatch):
    return use(monkeypatch, FakeDriver())


def use(monkeypatch, driver):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


def load(device=0, k=1536, size=1024):
    """(what the handler is told, the sentence) of one load."""
    message = ctypes.create_string_buffer(b"\xff" * (size + 8), size + 8)
    status = loader.load(device, FRONT, k, ctypes.addressof(message), size)
    assert message.raw[size:] == b"\xff" * 8, "written past the end of the message"
    return status, message.value.decode() if status else ""


def assert_loads():
    status, sentence = load()
    assert (status, sentence) == (0, "")
    assert library.handler.calls == [(0, 1536, TILES)]


def assert_fails(says):
    status, sentence = load()
    assert status == 1 and sentence.startswith(PREFIX), (status, sentence)
    faults.assert_sentence(sentence.removeprefix(PREFIX), says)
    assert not library.handler.calls, "something was published"


def test_a_whole_package_loads(package, driver):
    assert_loads()
    assert len(driver.images) == len(TILES) and driver.contexts == 0


@pytest.mark.parametrize("fault", [*faults.CUBIN_FAULTS, *faults.MANIFEST_FAULTS])
def test_a_damaged_package(fault, package, driver, monkeypatch):
    """One sentence where the implementation is chosen and where kernels are loaded; nothing
    published, no context left behind; repaired, it loads at once."""
    change, says = {**faults.CUBIN_FAULTS, **faults.MANIFEST_FAULTS}[fault]
    change(package)
    monkeypatch.setattr(library, "local_cuda_architectures", lambda: ("sm_90a",))
    faults.assert_sentence(library.missing(), says)
    assert_fails(says)
    assert driver.contexts == 0
    shutil.rmtree(package / "cubins")
    shutil.copytree(faults.PACKAGE / "cubins", package / "cubins")
    variants.manifest.cache_clear()
    assert library.missing() is None
    assert_loads()


def test_other_cubins_do_not_matter(package, driver, monkeypatch):
    """Of another K, or of a GPU that is not here; those of any that is here do."""
    faults.CUBIN_FAULTS["truncated cubin"][0](package)
    for architectures, k, whole in (
        (("sm_90a",), 1280, True),
        (("sm_100a",), None, True),
        (("sm_90a",), 1536, False),
        (("sm_100a", "sm_90a"), None, False),
    ):
        monkeypatch.setattr(library, "local_cuda_architectures", lambda a=architectures: a)
        assert (library.missing("index_front", k) is None) == whole, (architectures, k)


def test_no_memory_for_the_kernels(package, driver, monkeypatch):
    load_data = driver.cuLibraryLoadData
    driver.cuLibraryLoadData = lambda *_: (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    assert_fails("CUDA_ERROR_OUT_OF_MEMORY: .*lower XLA_CLIENT_MEM_FRACTION")
    assert driver.contexts == 0
    driver.cuLibraryLoadData = load_data
    assert_loads()


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (FakeDriver(init_error=RuntimeError("Failed to dlopen libcuda.so.1")), "driver.*libcuda"),
        (
            FakeDriver(init_error=OSError("it is found via system search. Install it.\nSee ...")),
            r"driver \(libcuda\) cannot be used \(it is found via system search\)$",
        ),
        (FakeDriver(init_error=CUresult.CUDA_ERROR_NO_DEVICE), "driver.*CUDA_ERROR_NO_DEVICE"),
        (FakeDriver(version=12020), "too old.*12.2.*12.4"),
        (None, "cuda-python is missing.*pip install"),
    ],
    ids=["no libcuda", "no libcuda, at length", "no device", "driver too old", "no cuda-python"],
)
def test_what_the_machine_lacks(driver, says, package, monkeypatch):
    """The same sentence where the implementation is chosen and where kernels are loaded."""
    use(monkeypatch, driver)
    monkeypatch.setattr(library, "local_cuda_architectures", lambda: ("sm_90a",))
    faults.assert_sentence(library.missing(), says)
    assert_fails(says)


@pytest.mark.parametrize("capability", [(8, 0), (9, 9)])
def test_a_device_without_kernels(capability, package, monkeypatch):
    use(monkeypatch, FakeDriver(capabilities=[capability]))
    major, minor = capability
    assert_fails(f"no kernel is shipped for sm_{major}{minor}a.*implementation")


def test_a_device_without_kernels_beside_one_with(package, monkeypatch):
    """It is named, and the other gets its kernels."""
    use(monkeypatch, FakeDriver(capabilities=[(9, 0), (8, 0)]))
    status, sentence = load(device=1)
    assert status == 1
    faults.assert_sentence(sentence, f"^{PREFIX}CUDA device 1 cannot run this program: .*sm_80a")
    assert load(device=0) == (0, "")
    assert library.handler.calls == [(0, 1536, TILES)]


@pytest.fixture
def interruptible():
    """Processes that a shell starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_by_the_keyboard(package, driver, monkeypatch):
    """The load fails, naming the reason, and the interrupt arrives where Python can raise it;
    nothing stays locked or half loaded."""
    read, calls = library.cubin, []

    def interrupted(entry):
        calls.append(entry)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return read(entry)

    monkeypatch.setattr(library, "cubin", interrupted)
    message = ctypes.create_string_buffer(1024)

    def loading():
        loader.load(0, FRONT, 1536, ctypes.addressof(message), 1024)
        time.sleep(2)

    with pytest.raises(KeyboardInterrupt):
        loading()
    assert message.value.decode() == PREFIX + "KeyboardInterrupt"
    assert driver.contexts == 0 and not library.handler.calls
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the lock is still held"
    assert library.handler.calls == [(0, 1536, TILES)]
    assert len(driver.images) == len(TILES), "a cubin was loaded twice"


@pytest.mark.parametrize("size", [1, 2, 40])
def test_a_short_message_buffer_is_not_overrun(size, package, driver):
    faults.CUBIN_FAULTS["missing cubin"][0](package)
    status, sentence = load(size=size)
    assert status == 1 and len(sentence) == size - 1


def test_one_cubin_for_all_devices(package, driver):
    """Loaded once per process, whatever the number of devices."""
    assert [load(device)[0] for device in (0, 1, 5)] == [0, 0, 0]
    assert len(driver.images) == len(TILES) and len(library.handler.calls) == 3


def test_reading_a_cubin(package):
    entry = next(e for e in variants.manifest()["kernels"] if e["name"] == faults.FIRST)
    assert library.cubin(entry).startswith(b"\x7fELF")
    for change, says in faults.CUBIN_FAULTS.values():
        change(package)
        with pytest.raises(library.KernelUnavailableError, match=says):
            library.cubin(entry)
        shutil.copytree(BUILT, package / "cubins", dirs_exist_ok=True)
