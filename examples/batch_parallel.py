"""Batch-parallel decoding with `shard_map`: rows and page pools are split, weights are replicated.

Every device owns a pool of pages and the sequences that live in it; slots count within the pool.
Nothing crosses devices, and each device's bytes are those of the same rows run alone.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_dsa_front as dsa

ROWS, HEADS, K = 3, 8, 1536  # rows per device
PAGES, PAGE = 32, 64  # per device
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def local_step(weights, projected, pool, slots):
    """One device's share: projected [ROWS, P], pool [1, PAGES, PAGE, 132], slots [ROWS]."""
    front = dsa.index_front(projected, *weights, pool[0], slots, **STATIC)
    return front.query, front.weights, front.cache[None]


def main() -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(
        local_step, mesh=mesh, in_specs=(whole, split, split, split), out_specs=split
    )
    step = jax.jit(mapped, donate_argnums=2)

    keys = jax.random.split(jax.random.key(0), 2)
    wq_b = jax.random.normal(keys[0], (HEADS * 128, K), jnp.bfloat16) * K**-0.5
    weights = jnp.ones(K, jnp.bfloat16), wq_b, jnp.ones(128), jnp.zeros(128)
    projected = jax.random.normal(keys[1], (devices * ROWS, K + 128 + HEADS), jnp.bfloat16)
    slots = jnp.arange(devices * ROWS, dtype=jnp.int32) * 31 % (PAGES * PAGE)
    pools = jnp.zeros((devices, PAGES, PAGE, 132), jnp.uint8)
    alone = jax.jit(local_step)
    expected = [
        alone(weights, projected[i : i + ROWS], pools[:1], slots[i : i + ROWS])
        for i in range(0, devices * ROWS, ROWS)
    ]

    arguments = (
        jax.device_put(weights, NamedSharding(mesh, whole)),
        *(jax.device_put(x, NamedSharding(mesh, split)) for x in (projected, pools, slots)),
    )
    compiled = step.lower(*arguments).compile()
    assert not [name for name in COLLECTIVES if name in compiled.as_text()]
    assert compiled.memory_analysis().alias_size_in_bytes >= pools.nbytes // devices
    got = step(*arguments)
    for left, right in zip(got, zip(*expected, strict=True), strict=True):
        assert (jax.device_get(left) == jax.device_get(jnp.concatenate(right))).all()
    print(f"batch_parallel: {devices} devices, no collectives, bytes equal those of each run alone")


if __name__ == "__main__":
    main()
