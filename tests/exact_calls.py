"""Calls whose quantisers see chosen bfloat16 values exactly, and groups to choose.

Query: all of q_a is one, so its RMS is one, and gamma picks the first column: the activations are
(1, 0, 0, ...), and the projection is the first column of wq_b. Zeros come out positive, because
the sum starts from zero. Key: with a norm weight of minus zero LayerNorm leaves the bias as it is,
minus zero too, so that a stack of biases is a list of keys.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import jax_dsa_front as dsa

EVERY = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
FINITE = EVERY[np.isfinite(EVERY)]
POSITIVE = FINITE[FINITE > 0]
K = 1280


def groups_with_maximum(largest, values):
    """f32 [n, 128] over all `values` up to `largest`, which itself leads each group of 32."""
    values = values[np.abs(values) <= largest]
    rows = -(-len(values) // 124) * 4
    body = np.resize(values, (rows, 31))
    return np.concatenate([np.full((rows, 1), largest), body], axis=1).reshape(-1, 128)


def groups_of_every_maximum():
    """f32 [n, 128]: every positive bfloat16 as the largest magnitude, negative; others random."""
    rng = np.random.default_rng(0)
    below = rng.uniform(-1, 1, (len(POSITIVE), 128)).astype(np.float32)
    values = (POSITIVE[:, None] * below).astype(ml_dtypes.bfloat16).astype(np.float32)
    values[:, 5::32] = -POSITIVE[:, None]
    return values


def front(batch, wq_b, bias, cache, slots, layer, fmt, implementation):
    """`index_front` on `batch` rows of ones, with the unit gamma and weights of scale one."""
    columns = K + 128 + wq_b.shape[0] // 128
    return dsa.index_front(
        jnp.ones((batch, columns + -columns % 8), jnp.bfloat16),
        jnp.zeros(K, jnp.bfloat16).at[0].set(1),
        wq_b,
        jnp.full(128, -0.0),
        bias,
        cache,
        slots,
        layer,
        key_offset=K,
        weight_offset=K + 128,
        eps=1e-30,
        key_eps=1e-6,
        cache_format=fmt,
        weights_dtype=jnp.float32,
        weight_scale=1.0,
        implementation=implementation,
    )


def query(values, fmt, implementation, batch=1):
    """`index_front(...)` whose projection is exactly `values`, bf16 [H * 128], in every row."""
    wq_b = jnp.pad(values[:, None], ((0, 0), (0, K - 1)))
    cache, slots = dsa.empty_cache(1, 64, cache_format=fmt), jnp.full(batch, -1)
    return front(batch, wq_b, jnp.zeros(128), cache, slots, None, fmt, implementation)


def insert_keys(keys, fmt, implementation, batch=1, heads=1, unroll=1):
    """The cache [n, 1, row] into which n calls put one of `keys`, f32 [n, 128], each.

    One of the call's rows inserts, each in turn. Where `batch` and `heads` lead to different
    kernels, all of them are worth a walk.
    """
    wq_b = jnp.zeros((heads * 128, K), jnp.bfloat16)

    def insert(cache, layer):
        slots = jnp.where(jnp.arange(batch) == layer % batch, layer, -1)
        return front(batch, wq_b, keys, cache, slots, layer, fmt, implementation).cache, None

    count = len(keys)
    cache = dsa.empty_cache(count, 1, cache_format=fmt)
    return lax.scan(insert, cache, jnp.arange(count), unroll=unroll)[0]
