"""Query and weights that the original fused kernel computed on an H200 (fp8, H = 32, K = 1536), and
the oracle and both implementations."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa_front as dsa
import oracle
from golden import inputs

RECORDED = np.load(pathlib.Path(__file__).parents[1] / "golden" / "index_front_fp8.npz")
CASES = sorted({name.split("/")[0] for name in RECORDED.files})


@pytest.fixture(params=CASES)
def recorded(request):
    """(inputs, recorded query codes, recorded weights as bfloat16 bits) of one case."""
    batch, seed, style = request.param.split("_", 2)
    arrays = inputs.make(int(seed[1:]), int(batch[1:]), style)
    assert (inputs.crc(arrays) == RECORDED[f"{request.param}/crc"]).all(), "inputs differ"
    return arrays, RECORDED[f"{request.param}/query"], RECORDED[f"{request.param}/weights"]


def arguments(arrays):
    """Positional and keyword arguments of the call that the recordings are of; keys are ours."""
    batch = arrays[0].shape[0]
    args = (*arrays, np.ones(128, np.float32), np.zeros(128, np.float32))
    cache = np.zeros((2, 64, 132), np.uint8)
    eps = dict(eps=inputs.EPS, key_eps=inputs.EPS)
    static = dict(key_offset=1536, weight_offset=1664, cache_format="fp8", **eps)
    return (*args, cache, np.arange(batch, dtype=np.int32)), static


@pytest.mark.parametrize("implementation", ["jnp", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_implementation(recorded, implementation):
    check(recorded, implementation)


@pytest.mark.gpu
def test_jnp_on_the_gpu(recorded):
    check(recorded, "jnp")


def check(recorded, implementation):
    arrays, query, weights = recorded
    args, static = arguments(arrays)
    front = jax.jit(lambda *args: dsa.index_front(*args, **static, implementation=implementation))(
        *map(jnp.asarray, args)
    )
    np.testing.assert_array_equal(np.asarray(front.weights).view(np.uint16), weights)
    equal = np.asarray(front.query).view(np.uint8) == query
    assert equal.mean() >= 0.999, f"{(~equal).sum()} bytes off, first at {np.argwhere(~equal)[:5]}"


def test_oracle(recorded):
    """The definition, evaluated in float64, is what the original computes."""
    arrays, query, weights = recorded
    args, static = arguments(arrays)
    want = oracle.front(*args, **static)
    recorded_weights = (weights.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(want.weights, recorded_weights)
    assert (want.query == query).mean() >= 0.9994
