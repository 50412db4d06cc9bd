"""Decoding with `lax.while_loop`: the cache is part of the carry and is updated in place.

The loop ends when every sequence has written its own number of tokens, a number that only the
device knows. A sequence that is done passes slot -1, which stores nothing.
"""

import functools

import jax
import jax.numpy as jnp

import jax_dsa_front as dsa

BATCH, HEADS, K = 4, 8, 1536
PAGES, PAGE = 6144, 64  # 52 MB: more than the workspace of XLA's GEMMs, 32 MiB
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")


def model(seed: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(q_norm, wq_b, key_norm_weight, key_norm_bias) and a projection that makes `projected`."""
    keys = jax.random.split(jax.random.key(seed), 2)
    wq_b = jax.random.normal(keys[0], (HEADS * 128, K), jnp.bfloat16) * K**-0.5
    project = jax.random.normal(keys[1], (256, K + 128 + HEADS), jnp.bfloat16) / 16
    return (jnp.ones(K, jnp.bfloat16), wq_b, jnp.ones(128), jnp.zeros(128)), project


def step(weights, project, hidden, cache, length, wanted):
    """One token for each sequence that wants more; each owns a run of PAGES // BATCH pages."""
    first = jnp.arange(BATCH) * (PAGES // BATCH * PAGE)
    slots = jnp.where(length < wanted, first + length, -1)
    front = dsa.index_front(hidden @ project, *weights, cache, slots, **STATIC)
    # A real model scores the cache, attends and samples here
    update = jnp.mean(front.query.astype(jnp.bfloat16) * front.weights[..., None], axis=1)
    hidden = jnp.tanh(hidden + jnp.concatenate([update, update], axis=1))
    return hidden, front.cache, jnp.minimum(length + 1, wanted)


@functools.partial(jax.jit, donate_argnames="cache")
def decode(weights, project, hidden, cache, wanted):
    def unfinished(state):
        return jnp.any(state[2] < wanted)

    def body(state):
        return step(weights, project, *state, wanted)

    return jax.lax.while_loop(unfinished, body, (hidden, cache, jnp.zeros_like(wanted)))


def main() -> None:
    weights, project = model(0)
    hidden = jax.random.normal(jax.random.key(1), (BATCH, 256), jnp.bfloat16)
    wanted = jnp.array([5, 0, 16, 9], jnp.int32)
    cache = dsa.empty_cache(PAGES, PAGE, cache_format="fp8")

    compiled = decode.lower(weights, project, hidden, cache, wanted).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes  # the cache comes out where it went in
    assert memory.temp_size_in_bytes < cache.nbytes  # and was not copied on the way
    address = cache.unsafe_buffer_pointer()
    _, cache, length = decode(weights, project, hidden, cache, wanted)
    assert cache.unsafe_buffer_pointer() == address

    assert length.tolist() == wanted.tolist()
    slots = jnp.arange(PAGES * PAGE).reshape(BATCH, -1)
    written = jnp.any(dsa.read_keys(cache, slots, cache_format="fp8") != 0, axis=-1)
    assert (written == (jnp.arange(slots.shape[1]) < wanted[:, None])).all()
    print(f"decode_while_loop: {int(wanted.sum())} keys stored in place, all other slots untouched")


if __name__ == "__main__":
    main()
