"""Head-parallel decoding with `shard_map`: `wq_b` is split by heads, rows and cache are replicated.

`num_heads` is the whole model's, `head_start` this shard's first head, from the axis index. Every
device inserts the key into its own copy of the cache, so the copies stay equal.
"""

import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_dsa_front as dsa

BATCH, HEADS, K = 5, 32, 1536
PAGES, PAGE = 32, 64
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def local_step(q_norm, wq_b, gain, bias, projected, cache, slots):
    """One device's heads, wq_b [HEADS / devices * 128, K]; all rows; its cache is [1, ...]."""
    own = wq_b.shape[0] // 128
    head_start = jax.lax.axis_index("model") * own
    front = dsa.index_front(
        *(projected, q_norm, wq_b, gain, bias, cache[0], slots),
        **STATIC,
        num_heads=HEADS,
        head_start=head_start,
    )
    return front.query, front.weights, front.cache[None]


def main() -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,))
    whole, first = PartitionSpec(), PartitionSpec("model")
    heads = PartitionSpec(None, "model")
    specs = (whole, first, whole, whole, whole, first, whole)
    mapped = jax.shard_map(local_step, mesh=mesh, in_specs=specs, out_specs=(heads, heads, first))
    step = jax.jit(mapped, donate_argnums=5)

    keys = jax.random.split(jax.random.key(0), 2)
    wq_b = jax.random.normal(keys[0], (HEADS * 128, K), jnp.bfloat16) * K**-0.5
    weights = jnp.ones(K, jnp.bfloat16), wq_b, jnp.ones(128), jnp.zeros(128)
    projected = jax.random.normal(keys[1], (BATCH, K + 128 + HEADS), jnp.bfloat16)
    slots = jnp.array([0, 7, -1, 64, PAGES * PAGE - 1], jnp.int32)
    cache = dsa.empty_cache(PAGES, PAGE, cache_format="fp8")
    front = jax.jit(functools.partial(dsa.index_front, **STATIC))
    expected = front(projected, *weights, cache, slots)

    caches = jnp.tile(cache, (devices, 1, 1, 1))
    arguments = (*weights, projected, caches, slots)
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    compiled = step.lower(*arguments).compile()
    assert not [name for name in COLLECTIVES if name in compiled.as_text()]
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes
    query, head_weights, caches = map(jax.device_get, step(*arguments))
    assert (query == jax.device_get(expected.query)).all()
    assert (head_weights == jax.device_get(expected.weights)).all()
    assert (caches == jax.device_get(expected.cache)).all()
    print(f"head_parallel: {devices} devices, no collectives, all bytes equal one device's")


if __name__ == "__main__":
    main()
