"""Faults of an installation or of a process, each in a process of its own on a copy of the package.

Every time: one sentence that says what is wrong, JAX computes on, and caches are as they were. What
goes wrong while kernels are loaded is in test_loader_faults.py and test_gpu_faults.py.
"""

import jax
import jax.numpy as jnp
import pytest

import faults
import small
from fault_programs import FORK, TARGETS, run, two_copies

CPU = dict(JAX_PLATFORMS="cpu")


@pytest.fixture(scope="module")
def good():
    """Digest of the step on the CPU, of an undamaged package."""
    with jax.default_device(jax.devices("cpu")[0]):
        return small.digest(small.step(*small.operands(pages=1), jnp.arange(small.BATCH)))


ASK = """
import jax, jax.numpy as jnp
import jax_dsa_front as dsa, small
from jax_dsa_front._runtime import library
args = *small.operands(pages=1), jnp.arange(small.BATCH)
before = small.digest(args)
print(library.missing())
try:
    small.step(*args, implementation="cuda")
except NotImplementedError as error:
    print(error)
print(small.digest(small.step(*args)))
assert small.digest(args) == before, "an operand changed"
"""
OLD_JAXLIB = """
import pathlib, jax
folder = pathlib.Path("include/xla/ffi/api")
folder.mkdir(parents=True)
(folder / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 0\\n#define XLA_FFI_API_MINOR 0\\n")
jax.ffi.include_dir = lambda: "include"
"""
A_GPU = "from jax_dsa_front._runtime import library; "
A_GPU += "library.local_cuda_architectures = lambda: ('sm_90a',)\n"
FAKE = A_GPU + "from fake_driver import FakeDriver; FakeDriver({}).install()"
NO_LIBCUDA = FAKE.format('init_error=RuntimeError("Failed to dlopen libcuda.so.1")')
PROCESS_FAULTS = {
    "missing cuda-python": (
        A_GPU + "import sys; sys.modules['cuda'] = None",
        "cuda-python.*pip install",
    ),
    "missing libcuda": (NO_LIBCUDA, "driver.*libcuda"),
    "driver too old": (FAKE.format("version=12020"), "driver is too old.*12.2.*12.4"),
    "handler too new": (OLD_JAXLIB, "handler speaks XLA FFI 0.*newer jaxlib"),
}
FILE_FAULTS = {
    **faults.HANDLER_FAULTS,
    **{name: faults.MANIFEST_FAULTS[name] for name in faults.MANIFEST_FAULTS if "manifest" in name},
    "directory as manifest": (faults.directory_as_manifest, "manifest.*cannot be read.*reinstall"),
}


@pytest.mark.parametrize("fault", [*FILE_FAULTS, *PROCESS_FAULTS])
def test_the_rest_works_and_cuda_says_what_is_wrong(fault, good, tmp_path):
    package, prepare = faults.copy_package(tmp_path), ""
    if fault in FILE_FAULTS:
        change, says = FILE_FAULTS[fault]
        change(package)
    else:
        prepare, says = PROCESS_FAULTS[fault]
    out, err = run(prepare + ASK, tmp_path, **CPU)
    missing, refused, result = out.strip().split("\n")
    faults.assert_sentence(missing, says)
    faults.assert_sentence(refused, says)
    assert refused.startswith('implementation="cuda" cannot run') and missing in refused
    at_import = f"jax_dsa_front has no kernels in this process: {missing}"
    assert (at_import in err) == ("handler" in missing), err
    assert result == good


def test_fork_after_import(good, tmp_path):
    faults.copy_package(tmp_path)
    out, _ = run(FORK.format(k=256, implementation=None), tmp_path, **CPU)
    assert out.split() == [good, good]


@pytest.mark.parametrize("name", ["jax_dsa_front", "vendored_front", "again"])
def test_two_copies_in_one_process(name, good, tmp_path):
    """A second one works, or its import says why not; the target never has two handlers, with
    which JAX could not start its CUDA backend."""
    assert two_copies(name, tmp_path, TARGETS, **CPU) == good


FORGOTTEN = """
import ctypes, gc, sys
from jax_dsa_front._runtime.library import handler
for name in [name for name in sys.modules if name.split(".")[0] == "jax_dsa_front"]:
    del sys.modules[name]
gc.collect()
message = ctypes.create_string_buffer(1024)
print(handler.JaxDsaFrontIndexFrontLaunch(0, 1536, None, 32, 4096, None, message, 1024))
print(message.value.decode())
"""


def test_kernels_are_asked_for_when_the_package_is_forgotten(tmp_path):
    """A program that JAX still holds may need them; the handler calls into Python then."""
    faults.copy_package(tmp_path)
    fake = "from fake_driver import FakeDriver; FakeDriver(capabilities=[(8, 0)]).install()"
    status, sentence = run(fake + FORGOTTEN, tmp_path, **CPU)[0].strip().split("\n")
    assert status == "1"
    faults.assert_sentence(sentence, "could not load its kernels.*no kernel is shipped for sm_80a")


EXIT = """
import atexit, ctypes, threading, time
def call():
    message = ctypes.create_string_buffer(1024)
    status = handler.JaxDsaFrontIndexFrontLaunch(0, 1536, None, 32, 4096, None, message, 1024)
    # One write: two threads print
    print(f"{status} {message.value.decode()}\\n", end="", flush=True)
def last():
    thread.join(60)  # has its sentence, and is to print it
    call()
atexit.register(last)  # in front of the package's own, and so called after it
from jax_dsa_front._runtime import library, loader
handler = library.handler
loading = threading.Event()
def slow(device, operator, key):
    loading.set()
    time.sleep(1)
    raise library.KernelUnavailableError("too slow")
loader._publish = slow
thread = threading.Thread(target=call, daemon=True)
thread.start()
loading.wait()
"""


def test_exit_while_kernels_are_loaded(tmp_path):
    """The interpreter waits for the load, and a later one is refused instead of entering Python."""
    faults.copy_package(tmp_path)
    out, err = run(EXIT, tmp_path, **CPU)
    lines = sorted(out.strip().split("\n"))
    assert len(lines) == 2 and all(line.startswith("1 jax_dsa_front c") for line in lines), out
    assert "shutting down" in lines[0] and "too slow" in lines[1]
    assert not err, err
