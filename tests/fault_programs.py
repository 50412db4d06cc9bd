"""Programs that the tests of faults run in a process of their own, on a copy of the package."""

import faults
from processes import outputs_of


def run(code, site, **env):
    """(stdout, stderr) of `code`, which sees the package under `site` and the test modules."""
    return outputs_of(code, cwd=site, site=site, PYTHONDONTWRITEBYTECODE="1", **env)


FORK = """
import os, signal
import jax, jax.numpy as jnp
import jax_dsa_front, small
def result():
    args = *small.operands(pages=1, k={k}), jnp.arange(small.BATCH)
    return small.digest(small.step(*args, implementation={implementation!r}))
child = os.fork()
if child == 0:
    signal.alarm(120)
    print(result(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child failed"
print(result())
"""

TWO_COPIES = """
import ctypes, importlib, pathlib, sys
from jax._src.lib import xla_client
import jax, jax.numpy as jnp
import jax_dsa_front as first, small
if NAME == "again":  # after an update of the package in a live session
    NAME = "jax_dsa_front"
else:
    sys.path.insert(0, str(pathlib.Path("second").resolve()))
kept = {{}}
if NAME == "jax_dsa_front":
    kept = {{n: sys.modules.pop(n) for n in list(sys.modules) if n.split(".")[0] == NAME}}
try:
    second = importlib.import_module(NAME)
    assert "second" in second.__file__
    print("works")
except ImportError as error:
    print(error)
sys.modules.update(kept)
{targets}
args = *small.operands(pages=1, k={k}), jnp.arange(small.BATCH)
print(small.digest(small.step(*args, implementation={implementation!r})))
"""
# What JAX does with queued targets when the CUDA plugin starts, and what XLA says to two handlers
TARGETS = """
def address(capsule):
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
registered = {}
def register(name, stages, *_):
    if not name.startswith("jax_dsa_front"):  # JAX's plugins queue targets of their own
        return
    found = {stage: address(capsule) for stage, capsule in stages.items()}
    assert registered.setdefault(name, found) == found, f"Duplicate FFI handler for {name}"
xla_client.register_custom_call_handler("CUDA", register)
assert list(registered) == [
    "jax_dsa_front.index_front.v1", "jax_dsa_front.index_scores.v1"
], registered
"""


def two_copies(name, tmp_path, targets, k=256, implementation=None, **env):
    faults.copy_package(tmp_path)
    faults.copy_package(tmp_path / "second", name)
    code = TWO_COPIES.format(targets=targets, k=k, implementation=implementation)
    out, _ = run(f"NAME = {name!r}\n{code}", tmp_path, **env)
    says, result = out.strip().split("\n")
    if says != "works":
        faults.assert_sentence(
            says, "jax_dsa_front.*(already|in this process before.*restart Python)"
        )
    return result
