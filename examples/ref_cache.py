"""A cache held in a `jax.new_ref`: written in place, without donation and without carrying it.

Read the reference, call, write the result back. XLA sees one buffer that goes in and comes out.
"""

import jax
import jax.numpy as jnp

import jax_dsa_front as dsa

LAYERS, BATCH, HEADS, K = 2, 4, 8, 1536
PAGES, PAGE, STEPS = 512, 64, 6
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")


@jax.jit
def decode(weights, projected, cache_ref, slots):
    """All steps and layers; returns the head weights, the cache changes behind its reference."""

    def token_step(_, inputs):
        rows, row_slots = inputs

        def layer_step(_, layer):
            front = dsa.index_front(rows, *weights, cache_ref[...], row_slots, layer, **STATIC)
            cache_ref[...] = front.cache
            return None, front.weights

        return None, jax.lax.scan(layer_step, None, jnp.arange(LAYERS))[1]

    return jax.lax.scan(token_step, None, (projected, slots))[1]


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    wq_b = jax.random.normal(keys[0], (LAYERS, HEADS * 128, K), jnp.bfloat16) * K**-0.5
    ones, norm = jnp.ones((LAYERS, K), jnp.bfloat16), jnp.ones((LAYERS, 128))
    weights = ones, wq_b, norm, jnp.zeros_like(norm)
    projected = jax.random.normal(keys[1], (STEPS, BATCH, K + 128 + HEADS), jnp.bfloat16)
    slots = jnp.arange(STEPS * BATCH, dtype=jnp.int32).reshape(STEPS, BATCH)

    cache_ref = jax.new_ref(dsa.empty_cache(PAGES, PAGE, cache_format="fp8", layers=LAYERS))
    nbytes = cache_ref[...].nbytes
    memory = decode.lower(weights, projected, cache_ref, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes
    assert memory.temp_size_in_bytes < nbytes // LAYERS
    decode(weights, projected, cache_ref, slots)

    # The same rows in one call per layer store the same keys
    rows = projected.reshape(STEPS * BATCH, -1)
    expected = dsa.empty_cache(PAGES, PAGE, cache_format="fp8", layers=LAYERS)
    for layer in range(LAYERS):
        expected = dsa.index_front(rows, *weights, expected, slots.ravel(), layer, **STATIC).cache
    assert (cache_ref[...] == expected).all()
    print(f"ref_cache: {STEPS * BATCH * LAYERS} keys stored behind the reference, all bytes equal")


if __name__ == "__main__":
    main()
