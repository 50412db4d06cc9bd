"""Test-wide settings: strict dtype promotion, and who may use the GPU.

Tests marked `gpu` run only where JAX has a CUDA device. Elsewhere they are skipped, unless
JAX_DSA_FRONT_REQUIRE_GPU=1 promises a GPU: then they fail, so that a broken driver or plugin
cannot pass for a green run. All other tests compute on the CPU, also on a machine with a GPU.
"""

import os

# Several test processes may share a GPU; JAX would give the first one most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

from jax_dsa_front._runtime import variants

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure():
    if not variants.MANIFEST.exists():  # as with `python -m pytest` in a clone
        raise pytest.UsageError(
            f"the package under test was not built: {variants.CUBINS.parent}; install it, and run "
            "pytest, or python -P -m pytest"
        )


def cuda_devices():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None or cuda_devices():
        return
    if os.environ.get("JAX_DSA_FRONT_REQUIRE_GPU") == "1":
        pytest.fail("JAX_DSA_FRONT_REQUIRE_GPU=1, but JAX has no CUDA device", pytrace=False)
    pytest.skip("needs a GPU: JAX has no CUDA device")


@pytest.fixture(autouse=True)
def compute_on_the_marked_device(request):
    platform = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    with jax.default_device(jax.devices(platform)[0]):
        yield


@pytest.fixture
def several_gpus():
    """All CUDA devices, for tests of what one device cannot show. One is enough for the promise of
    JAX_DSA_FRONT_REQUIRE_GPU, so that without a second the test is skipped."""
    if len(devices := cuda_devices()) < 2:
        pytest.skip("needs two GPUs: JAX has one CUDA device")
    return devices
