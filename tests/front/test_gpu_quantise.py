"""The kernels' e2m1 arithmetic in full: every bfloat16 value under every scale that it can meet.

No Hopper instruction converts to e2m1, so the kernels do it with integers. Each has the quantisers
of query and key compiled in, so each takes the walk: with 32 heads on an H200 these batches lead
to split_n, split_k, and split_k_rows with tiles of 64 and of 128 (docs/kernels.md, "Which kernel").
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import exact_calls
import oracle
from cases import BF16
from compare import as_bytes, assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("batch", [1, 9, 65, 129])]
HEADS = 32
SCALES = range(-126, 127)  # exponents of two: of the amax floor, and of the largest bfloat16


@functools.cache
def every_value_under_every_scale():
    """f32 [n * HEADS, 128], of bfloat16 values: 13 million in 400,000 groups of 32."""
    finite = exact_calls.FINITE
    tops = [min(6 * 2.0**exponent, float(finite.max())) for exponent in SCALES]
    walk = [exact_calls.groups_with_maximum(np.float32(top), finite) for top in tops]
    zero = np.zeros((4, 32), np.float32)
    zero[1] = -0.0
    zero[2, ::2] = -0.0
    zero[3, 7] = 1  # one group that is not zero, beside others that are
    zeros = zero[[0, 1, 2, 3, 1, 0, 3, 2, 2, 2, 1, 1]].reshape(-1, 128)
    rows = np.concatenate([*walk, exact_calls.groups_of_every_maximum(), zeros])
    return np.resize(rows, (-(-len(rows) // HEADS) * HEADS, 128))  # repeats the first few


@functools.cache
def quantised(sign_of_zero):
    """The oracle's (packed codes, exponent bytes) of all of them."""
    values = every_value_under_every_scale().astype(np.float64)
    packed, exponents = oracle.quantise_mxfp4(values if sign_of_zero else values + 0.0)
    assert set(exponents.reshape(-1).tolist()) == {exponent + 127 for exponent in SCALES}
    return packed, exponents


def test_query(batch):
    """Every row of the batch holds the same values, and so has to have the same bytes."""
    values = every_value_under_every_scale().astype(BF16).reshape(-1, HEADS * 128)

    def call(same, head_values):
        front = exact_calls.query(head_values, "mxfp4", "cuda", batch)
        same &= jnp.all(front.query == front.query[:1])
        same &= jnp.all(front.query_scale == front.query_scale[:1])
        return same, (front.query[0], front.query_scale[0])

    walk = jax.jit(lambda values: lax.scan(call, jnp.bool(True), values))
    same, (query, scale) = walk(jnp.asarray(values))
    packed, exponents = quantised(sign_of_zero=False)
    assert_equal(as_bytes(scale[..., None]).reshape(exponents.shape), exponents, "scale")
    assert_equal(query.reshape(packed.shape), packed, "query")
    assert same, "the rows of a batch differ"


def test_key(batch):
    keys = jnp.asarray(every_value_under_every_scale())
    walk = jax.jit(
        lambda keys: exact_calls.insert_keys(keys, "mxfp4", "cuda", batch, HEADS, unroll=16)
    )
    values, scales = oracle.split_page(np.asarray(walk(keys)))
    packed, exponents = quantised(sign_of_zero=True)
    assert_equal(scales[:, 0], exponents, "scales")
    assert_equal(values[:, 0], packed, "values")
