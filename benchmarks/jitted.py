"""Jitted programs around the operator, and what a layer or a call of them takes: H = 32, K = 1536.

Inside jit there are two times. *Wall* is what a clock shows while calls are pipelined; a slow host
dominates it. *Device* is the sum of the durations of all kernels, by jax.profiler, without the gaps
between them, and with what the profiler adds (up to 6 %).
"""

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_dsa_front as dsa

HEADS, K, LAYERS = 32, 1536, 24
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")


def wall_us(step, state, inner, repeats=15, calls=20):
    """Median microseconds of one of `inner` parts of step(state) -> state, pipelined `calls`
    deep."""
    state = jax.tree.map(jnp.copy, state)  # it is donated
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state)
        samples.append((time.perf_counter() - start) * 1e6 / (calls * inner))
    return statistics.median(samples)


def operands(batch, seed=0):
    rng = np.random.default_rng(seed)
    projected = jnp.asarray(rng.standard_normal((batch, K + 128 + HEADS)), jnp.bfloat16)
    q_norm = jnp.asarray(1 + 0.1 * rng.standard_normal(K), jnp.bfloat16)
    pages = max(64, -(-batch // 64))
    slots = jnp.asarray(rng.permutation(pages * 64)[:batch], jnp.int32)
    return projected, q_norm, pages, slots


def device_us(step, state, inner, calls=4):
    """Microseconds that kernels and copies take per part, by the profiler."""
    state = jax.block_until_ready(step(jax.tree.map(jnp.copy, state)))  # it is donated
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                state = step(state)
            jax.block_until_ready(state)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        lines = [line for plane in planes if "GPU:0" in plane.name for line in plane.lines]
        events = [e for line in lines if line.name.startswith("Stream") for e in line.events]
    return sum(event.duration_ns for event in events) / 1e3 / (calls * inner)


def compile_all(programs):
    """{name: (step, state)} of {name: (jitted, arguments, state)}, compiled side by side.

    The jitted function takes the arguments, then the state, and returns the next state first."""

    def compiled(program):
        function, arguments, state = program
        executable = function.lower(*arguments, *state).compile()
        return lambda state: executable(*arguments, *state)[: len(state)], state

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(programs, pool.map(compiled, programs.values()), strict=True))


def chain(weights, batch, index_front):
    """An unrolled chain of as many layers as there are matrices; the next depends on the last."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)

    @partial(jax.jit, donate_argnums=2)
    def run(weights, projected, cache):
        queries = []
        for matrix in weights:
            front = index_front(projected, q_norm, matrix, ones, zeros, cache, slots, **STATIC)
            cache = front.cache
            projected = projected + front.weights[:, :1] * jnp.bfloat16(0)
            queries.append(front.query)
        return projected, cache, queries

    return run, (weights,), (projected, dsa.empty_cache(pages, cache_format="fp8"))


def scan(stack, batch, index_front, unroll, consumed, sliced=()):
    """A scan over stacked weights and one stacked, donated cache. The results are stacked, or
    consumed: one small fusion adds them to the next layer's rows. The scan slices the weights that
    `sliced` names, instead of passing the layer's number only."""
    projected, q_norm, pages, slots = operands(batch)
    norms = dict(q_norm=q_norm, key_norm_weight=jnp.ones(128), key_norm_bias=jnp.zeros(128))
    norms |= {name: jnp.tile(norms[name], (LAYERS, 1)) for name in norms if name in sliced}

    @partial(jax.jit, donate_argnums=(1, 2))
    def run(weights, rows, cache):
        def body(carry, step):
            rows, cache = carry
            layer, own = step
            call = weights | own | dict(cache=cache, slots=slots, layer=layer)
            front = index_front(rows, **call, **STATIC)
            if not consumed:
                return (rows, front.cache), (front.query, front.weights)
            query = front.query.astype(jnp.bfloat16)
            mixed = jnp.mean(query * front.weights[..., None], axis=1)
            return (rows.at[:, :128].add(mixed), front.cache), None

        steps = jnp.arange(LAYERS), {name: weights[name] for name in sliced}
        carry, results = jax.lax.scan(body, (rows, cache), steps, unroll=unroll)
        return *carry, results

    cache = dsa.empty_cache(pages, cache_format="fp8", layers=LAYERS)
    return run, ({"wq_b": stack} | norms,), (projected, cache)


def dispatch_us(weights, batch, index_front, calls=1000):
    """Host microseconds per call of a jitted index_front: the wall time of enqueueing many, before
    any is waited for."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)
    call = jax.jit(
        lambda cache: index_front(
            projected, q_norm, weights[0], ones, zeros, cache, slots, **STATIC
        ),
        donate_argnums=0,
    )
    cache = dsa.empty_cache(pages, cache_format="fp8")
    samples = []
    for _ in range(7):
        cache = jax.block_until_ready(cache)
        start = time.perf_counter()
        for _ in range(calls):
            cache = call(cache).cache
        samples.append((time.perf_counter() - start) * 1e6 / calls)
        jax.block_until_ready(cache)
    return statistics.median(samples)
