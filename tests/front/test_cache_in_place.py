"""The cache is updated where it lies: compiled CPU programs neither copy nor rewrite it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dsa_front as dsa
from compare import assert_equal, assert_same_as_eager
from programs import assert_in_place, touched
from small import (
    BATCH,
    PAGE,
    PROGRAMS,
    ROW,
    STACKED,
    layer_bytes,
    layer_scan,
    layers_as_xs,
    operands,
    plain,
    step,
    token_scan,
)

OTHERS = ("mxfp8", "mxfp4")


@pytest.mark.parametrize(
    ("program", "fmt"),  # every program once; the other formats change the step, not the programs
    [*((p, "fp8") for p in PROGRAMS), *((p, f) for p in (plain, layer_scan) for f in OTHERS)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_donated_cache_is_not_copied(program, fmt):
    """By the compiled text; and loops, jit in jit and remat change no byte of what is computed."""
    args = operands(stacked=program in STACKED, fmt=fmt)
    compiled = jax.jit(program, static_argnums=3, donate_argnums=2).lower(*args, fmt).compile()
    assert_in_place(compiled, layer_bytes(args[2]))
    if program in STACKED:  # a layer may be widened for the dot, the stack of all may not
        stack = args[1][1]
        assert not touched(compiled.as_text(), stack.size * 2, ("bf16", "f32"))
    assert_same_as_eager(compiled, program, args, fmt)
    assert args[2].is_deleted()


def test_layers_that_a_scan_slices_are_right():
    """Layers of weights and cache as inputs and outputs of the scan."""
    args = operands(stacked=True)
    compiled = jax.jit(layers_as_xs, static_argnums=3).lower(*args, "fp8").compile()
    assert_same_as_eager(compiled, layers_as_xs, args, "fp8")


def test_donated_pointer_is_stable():
    projected, weights, cache = operands(seed=2)
    fn = jax.jit(step, donate_argnums=2)
    pointer = cache.unsafe_buffer_pointer()
    for token in range(3):
        cache = fn(projected, weights, cache, jnp.arange(BATCH) + token).cache
        assert cache.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("program", [plain, token_scan, layer_scan], ids=lambda p: p.__name__)
def test_without_donation_one_copy_outside_any_loop(program):
    args = operands(seed=3, stacked=program in STACKED)
    before = np.asarray(args[2]).copy()
    compiled = jax.jit(program, static_argnums=3).lower(*args, "fp8").compile()
    assert_in_place(compiled, layer_bytes(args[2]), copies=["copy"])
    entry = compiled.as_text().split("\nENTRY ")[1]
    assert len(touched(entry, layer_bytes(args[2]))) == 1, (
        "the copy is not in the entry computation"
    )
    assert_same_as_eager(compiled, program, args, "fp8")
    assert_equal(args[2], before, "the caller's array")


def test_cond_updates_in_place_in_one_branch():
    """Both branches return the cache; on CPU XLA may not copy where only one of them writes."""
    projected, weights, cache = operands(seed=4)

    def fn(projected, weights, cache, on):
        update = lambda c: step(projected, weights, c, jnp.arange(BATCH)).cache  # noqa: E731
        return lax.cond(on, update, lambda c: c, cache)

    compiled = jax.jit(fn, donate_argnums=2).lower(projected, weights, cache, True).compile()
    assert_in_place(compiled, layer_bytes(cache))
    before = np.asarray(cache).copy()
    want = step(projected, weights, cache, jnp.arange(BATCH)).cache
    skipped = jax.jit(fn)(projected, weights, cache, False)
    assert_equal(skipped, before, "branch not taken")
    assert_equal(jax.jit(fn, donate_argnums=2)(projected, weights, cache, True), want, "taken")


def test_new_ref_cache():
    """`ref[...] = front.cache` inside jit: nothing is donated by name, and nothing copied."""
    projected, weights, cache = operands(seed=5)
    want = step(projected, weights, cache, jnp.arange(BATCH))
    ref = jax.new_ref(cache)

    @jax.jit
    def fn(ref):
        front = step(projected, weights, ref[...], jnp.arange(BATCH))
        ref[...] = front.cache
        return front.weights

    compiled = fn.lower(ref).compile()
    assert_in_place(compiled, layer_bytes(cache))
    assert_equal(fn(ref), want.weights, "weights")
    assert_equal(ref[...], want.cache, "cache")


def median_seconds(pages):
    projected, weights, cache = operands(pages=1)
    cache = jnp.zeros((pages, PAGE, ROW["fp8"]), jnp.uint8)
    fn = jax.jit(step, donate_argnums=2)
    times = []
    for token in range(21):
        slots = jnp.arange(BATCH) * (pages * PAGE // BATCH) + token
        start = time.perf_counter()
        front = fn(projected, weights, cache, slots)
        jax.block_until_ready(front)
        times.append(time.perf_counter() - start)
        cache = front.cache
    return sorted(times[1:])[10]


def test_time_does_not_grow_with_the_cache():
    """64 pages against 65,536 (554 MB): a program that touches the whole cache is 100x slower."""
    few, many = median_seconds(64), median_seconds(65536)
    assert many < 5 * few, f"{few * 1e6:.0f} us with 64 pages, {many * 1e6:.0f} with 65,536"


def test_far_end_of_a_cache_past_2_gib():
    """Byte offsets past 2**31: the last token is written, and nothing near any wrapped offset."""
    fmt = "mxfp4"
    pages = 2**31 // (PAGE * ROW[fmt]) + 64
    projected, weights, _ = operands(seed=6, pages=1)
    cache = jnp.zeros((pages, PAGE, ROW[fmt]), jnp.uint8)
    slots = jnp.array([pages * PAGE - 1, pages * PAGE, -1, 5])
    fn = jax.jit(step, static_argnames="fmt", donate_argnums=2)
    cache = fn(projected, weights, cache, slots, fmt=fmt).cache
    one_page = jnp.zeros((1, PAGE, ROW[fmt]), jnp.uint8)
    want = step(projected, weights, one_page, jnp.array([63, -1, -1, 5]), fmt=fmt).cache
    keys = dsa.read_keys(cache, slots, cache_format=fmt)
    assert_equal(keys[0], dsa.read_keys(want, jnp.array([63]), cache_format=fmt)[0], "last key")
    assert_equal(keys[3], dsa.read_keys(want, jnp.array([5]), cache_format=fmt)[0], "first key")
    got, want = (np.asarray(x).reshape(-1).view(np.uint32) for x in (cache, want))
    assert np.count_nonzero(got) == np.count_nonzero(want)
