"""Faults that only a GPU reaches: while XLA initialises a program, while work is in flight.

Each in a process of its own on a copy of the package; afterwards the device computes on, and where
the fault can be repaired the same process runs the kernel.
"""

import jax
import jax.numpy as jnp
import pytest

import faults
import small
from fault_programs import FORK, run, two_copies
from processes import run_python

pytestmark = pytest.mark.gpu
GPU = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")
K = 1536

CALL = """
import functools, shutil, signal, warnings
import jax, jax.numpy as jnp
import jax_dsa_front as dsa, small
from jax_dsa_front._runtime import library, loader, variants
args = *small.operands(k=1536, pages=2), jnp.arange(small.BATCH)
before = small.digest(args)
def call(implementation="cuda"):
    step = jax.jit(functools.partial(small.step, implementation=implementation))
    return small.digest(step(*args))
def failing():
    try:
        call()
        return "it ran"
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        assert small.digest(args) == before, "an operand changed"
"""
DAMAGED = (
    CALL
    + """
print(failing())
with warnings.catch_warnings(record=True) as caught:
    warnings.filterwarnings("always", "index_front")
    assert call(None) == call("jnp")
print(*(w.message for w in caught if "index_front" in str(w.message)))
missing, library.missing = library.missing, lambda *_: None  # as in a program lowered elsewhere
print(failing())
donated = jnp.copy(args[2])
step = jax.jit(functools.partial(small.step, implementation="cuda"), donate_argnums=2)
try:
    jax.block_until_ready(step(*args[:2], donated, args[3]))
except Exception:
    print("deleted" if donated.is_deleted() else bool(jnp.all(donated == args[2])))
library.missing = missing
with jax.default_device(jax.devices("cpu")[0]):
    small.step(*small.operands(pages=1), jnp.arange(small.BATCH))
shutil.copytree(GOOD, variants.CUBINS, dirs_exist_ok=True)
variants.manifest.cache_clear()
print(call())
"""
)
INTERRUPTED = (
    CALL
    + """
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
kernel = loader._kernel
def interrupted(*arguments):
    loader._kernel = kernel
    signal.raise_signal(signal.SIGINT)
    return kernel(*arguments)
loader._kernel = interrupted
for _ in range(3):
    try:
        print(call())
        break
    except BaseException as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
"""
)
IN_FLIGHT = (
    CALL
    + """
step = jax.jit(functools.partial(small.step, implementation="cuda"), donate_argnums=2)
call()
cache = jnp.copy(args[2])
for _ in range(3000):
    cache = step(*args[:2], cache, args[3]).cache
print("leaving")
"""
)
OUT_OF_MEMORY = (
    CALL
    + """
limit = jax.devices("cuda")[0].memory_stats()["bytes_limit"]
pages = limit * 6 // 10 // (64 * 132)
cache = jnp.full((pages, 64, 132), 7, jnp.uint8)
step = jax.jit(functools.partial(small.step, implementation="cuda"))
try:
    jax.block_until_ready(step(*args[:2], cache, args[3]))  # copies the cache: it is not donated
except Exception as error:
    print(str(error).splitlines()[0])
assert bool(jax.jit(lambda cache: jnp.all(cache == 7))(cache)), "the cache changed"
del cache
print(call())
"""
)


@pytest.fixture(scope="module")
def good_cuda():
    with jax.default_device(jax.devices("cuda")[0]):
        args = *small.operands(k=K, pages=2), jnp.arange(small.BATCH)
        return small.digest(small.step(*args, implementation="cuda"))


@pytest.mark.parametrize("fault", [*faults.CUBIN_FAULTS, *faults.MANIFEST_FAULTS])
def test_damaged_cubins(fault, good_cuda, tmp_path):
    """Lowering it for the kernel fails with the sentence, and so does the call of a program that
    was lowered before, which may lose what was donated to it; without a command the jnp form runs,
    with a warning; the device computes on; repaired, the same process runs."""
    change, says = {**faults.CUBIN_FAULTS, **faults.MANIFEST_FAULTS}[fault]
    change(faults.copy_package(tmp_path))
    code = f"GOOD = {str(faults.PACKAGE / 'cubins')!r}\n{DAMAGED}"
    lowered, warned, called, donated, result = run(code, tmp_path, **GPU)[0].strip().split("\n")
    assert lowered.startswith('NotImplementedError: implementation="cuda" cannot run: ')
    assert "jax_dsa_front could not load its kernels: " in called
    assert warned.startswith("index_front runs without its kernel: ")
    for sentence in (lowered, warned, called):
        faults.assert_sentence(sentence, says)
    assert donated in ("deleted", "True"), donated
    assert result == good_cuda


def test_interrupt_during_the_first_load(good_cuda, tmp_path):
    """It ends the call, whether as itself or as the call's error; the next one loads and runs."""
    faults.copy_package(tmp_path)
    out, err = run(INTERRUPTED, tmp_path, **GPU)
    *interrupted, result = out.strip().split("\n")
    assert interrupted and all("KeyboardInterrupt" in line for line in interrupted), out
    assert "Exception ignored" not in err, err
    assert result == good_cuda


def test_exit_with_work_in_flight(tmp_path):
    faults.copy_package(tmp_path)
    out, err = run(IN_FLIGHT, tmp_path, **GPU)
    assert out == "leaving\n"
    assert not [word for word in ("Fatal", "terminate", "Traceback", "CUDA_ERROR") if word in err]


def test_out_of_memory_around_the_call(good_cuda, tmp_path):
    faults.copy_package(tmp_path)
    env = dict(XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION="0.03")
    sentence, result = run(OUT_OF_MEMORY, tmp_path, **env)[0].strip().split("\n")
    assert "RESOURCE_EXHAUSTED" in sentence and result == good_cuda


def test_fork_after_import_uses_the_gpu_in_both(tmp_path):
    faults.copy_package(tmp_path)
    out, _ = run(FORK.format(k=K, implementation="cuda"), tmp_path, **GPU)
    child, parent = out.split()
    assert child == parent


@pytest.mark.parametrize("name", ["jax_dsa_front", "vendored_front"])
def test_two_copies_on_a_gpu(name, tmp_path):
    """With the real CUDA backend: it starts, and the kernel runs."""
    assert two_copies(name, tmp_path, "", k=K, implementation="cuda", **GPU)


OLD_SECOND_GPU = """
import functools
import jax, jax.numpy as jnp
import small
from jax_dsa_front._runtime import library, loader, variants
devices = jax.devices("cuda")[:2]
args = *small.operands(k=1536, pages=4), jnp.arange(small.BATCH)
def program(implementation):  # a new one each time: JAX remembers what it has lowered
    return jax.jit(functools.partial(small.step, implementation=implementation))
def outcome(device, implementation=None):
    try:
        return small.digest(program(implementation)(*jax.device_put(args, devices[device])))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
real, publish = variants.architecture, loader._publish
def publish_with_an_old_one(device, operator, key):
    variants.architecture = (lambda _: "sm_80a") if device == 1 else real
    publish(device, operator, key)
kernels = library.local_cuda_architectures()  # what a program is lowered for
loader._publish = publish_with_an_old_one
print(outcome(1, "cuda"))
print(outcome(0, "cuda"))
library.local_cuda_architectures = lambda: (kernels[0], "sm_80a")
print(outcome(0, "cuda"))
text = program(None).lower(*args).as_text()
print("jax_dsa_front.index_front" in text, len(outcome(0)), len(outcome(1)))
"""


@pytest.mark.usefixtures("several_gpus")
def test_second_gpu_without_a_kernel(tmp_path):
    """A program lowered elsewhere fails on it alone; one that is lowered here avoids the kernel."""
    output = run_python(OLD_SECOND_GPU, cwd=tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    elsewhere, first, refusal, jnp_form = output.strip().split("\n")
    reason = "no kernel is shipped for sm_80a, only for sm_90a, sm_100a, sm_103a"
    assert f"CUDA device 1 cannot run this program: {reason}" in elsewhere
    args = *small.operands(k=1536, pages=4), jnp.arange(small.BATCH)
    assert first == small.digest(small.step(*args, implementation="cuda"))
    assert refusal == f'NotImplementedError: implementation="cuda" cannot run: {reason}'
    assert jnp_form == "False 64 64", "it computes on both, without the kernel"
