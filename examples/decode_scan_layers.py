"""`lax.scan` over layers with stacked weights and cache: pass the stacks whole, and `layer`.

A scan that takes the weights and the cache as `xs` slices them, and most slices are copied in front
of the call. Here the scan runs over layer numbers only; the stacks are closed over, the cache is
carried.
"""

import functools

import jax
import jax.numpy as jnp

import jax_dsa_front as dsa

LAYERS, BATCH, HEADS, K = 3, 4, 8, 1536
PAGES, PAGE = 6144, 64  # 52 MB a layer: more than the workspace of XLA's GEMMs, 32 MiB
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")


def model(seed: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Stacked (q_norm, wq_b, key_norm_weight, key_norm_bias) and projections."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q_norm = 1 + 0.1 * jax.random.normal(keys[0], (LAYERS, K), jnp.bfloat16)
    wq_b = jax.random.normal(keys[1], (LAYERS, HEADS * 128, K), jnp.bfloat16) * K**-0.5
    gain, bias = 1 + 0.1 * jax.random.normal(keys[2], (2, LAYERS, 128))
    project = jax.random.normal(keys[3], (LAYERS, 256, K + 128 + HEADS), jnp.bfloat16) / 16
    return (q_norm, wq_b, gain, bias), project


def mix(hidden, front):
    """Stands for scoring, attention and the rest of a layer."""
    update = jnp.mean(front.query.astype(jnp.bfloat16) * front.weights[..., None], axis=1)
    return jnp.tanh(hidden + jnp.concatenate([update, update], axis=1))


@functools.partial(jax.jit, donate_argnames="cache")
def scanned(weights, project, hidden, cache, slots):
    def layer_step(carry, layer):
        hidden, cache = carry
        rows = hidden @ project[layer]
        front = dsa.index_front(rows, *weights, cache, slots, layer, **STATIC)
        return (mix(hidden, front), front.cache), (rows, front.query, front.weights)

    return jax.lax.scan(layer_step, (hidden, cache), jnp.arange(LAYERS))


def main() -> None:
    weights, project = model(0)
    hidden = jax.random.normal(jax.random.key(1), (BATCH, 256), jnp.bfloat16)
    slots = jnp.array([0, 63, 64, PAGES * PAGE - 1], jnp.int32)
    cache = dsa.empty_cache(PAGES, PAGE, cache_format="fp8", layers=LAYERS)

    memory = scanned.lower(weights, project, hidden, cache, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes // LAYERS  # no copy, not even of one layer
    (_, cache), layers = scanned(weights, project, hidden, cache, slots)

    # The same rows in a call per layer, each with that layer's own arrays
    for layer, (rows, query, head_weights) in enumerate(zip(*layers, strict=True)):
        own = [stack[layer] for stack in weights]
        empty = dsa.empty_cache(PAGES, PAGE, cache_format="fp8")
        front = dsa.index_front(rows, *own, empty, slots, **STATIC)
        assert (query == front.query).all() and (head_weights == front.weights).all()
        assert (cache[layer] == front.cache).all()
    print(f"decode_scan_layers: {LAYERS} scanned layers equal {LAYERS} calls apart, bit for bit")


if __name__ == "__main__":
    main()
