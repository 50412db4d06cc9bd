"""The scorer's kernels: against float64 and the jnp form, rerun, alone, in graphs and in place."""

import concurrent.futures
import functools
import gc
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import cases
import jax_dsa_front as dsa
import oracle
import score_calls
import small
from compare import assert_equal
from filled_caches import filled

pytestmark = pytest.mark.gpu
SEED = int(os.environ.get("JAX_DSA_FRONT_FUZZ_SEED", "0"))
CALLS = int(os.environ.get("JAX_DSA_FRONT_FUZZ_CALLS", "2000"))
SHAPES = 36
SCORES = functools.partial(dsa.index_scores, implementation="cuda")


def as_query(codes, fmt):
    return jnp.asarray(codes if fmt == "mxfp4" else codes.view(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 130])
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_scores_equal_float64(fmt, heads, page_size, rows):
    """Within 1e-3 of the magnitudes that were added: tensor cores keep fewer bits than fp32."""
    codes, scale, weights, cache = filled(
        fmt, page_size, pages=13, batch=3 * rows, heads=heads, seed=heads + page_size + rows
    )
    rng = np.random.default_rng(rows)
    table = np.stack([rng.permutation(13)[:9] for _ in range(3)]).astype(np.int32)
    lens = rng.integers(0, 9 * page_size + 1, 3 * rows)
    lens[:2] = 9 * page_size, 0
    if rows % 2:
        weights = weights.astype(ml_dtypes.bfloat16)
    got = SCORES(as_query(codes, fmt), scale, weights, cache, table, lens, 1, cache_format=fmt)
    rest = codes, scale, weights.astype(np.float32), cache, np.repeat(table, rows, 0), lens, fmt, 1
    want, size = oracle.scores(*rest), oracle.score_magnitudes(*rest)
    inside = np.isfinite(want)
    assert (np.isneginf(got) == ~inside).all()
    share = np.abs(np.asarray(got)[inside] - want[inside]) / np.maximum(size[inside], 1e-30)
    assert share.size and share.max() <= 1e-3, share.max()


def test_kernel_equals_jnp_form():
    """Random shapes, lengths, tables and layers: no wrong mask, NaN or score; equal bits again."""
    shapes = score_calls.random_shapes(SHAPES, SEED)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(score_calls.Program, shapes))
    each = -(-CALLS // SHAPES)
    for program in programs:
        program.run(SEED, 1)
    gc.collect()
    before = jax.devices("cuda")[0].memory_stats()["bytes_in_use"]
    worst = scores = 0
    for program in programs:
        found = program.run(SEED + 1, each)
        wrong = {name: found[name] for name in score_calls.MUST_BE_ZERO if found[name]}
        assert not wrong, f"{wrong} in {each} calls of seed {SEED + 1} of {program.shape}"
        worst, scores = max(worst, found["worst"]), scores + found["scores"]
    gc.collect()
    assert jax.devices("cuda")[0].memory_stats()["bytes_in_use"] == before and scores
    print(f"{SHAPES * each} calls, {scores} scores, seed {SEED}: worst {worst:.2e} of magnitudes")


def device_call(sequences, table_pages, fmt="fp8", heads=32, rows=1, pages=None, seed=0, **more):
    """Operands on the device: (query, query_scale, weights, cache, block_table, context_lens)."""
    shape = score_calls.Shape(
        fmt, heads, 64, rows, sequences, table_pages, pages or sequences * table_pages,
        **dict(layers=None, traced=False, weights="float32", integer="int32") | more,
    )  # fmt: skip
    query, *rest = jax.jit(functools.partial(score_calls.drawn, shape))(jax.random.key(seed))
    return query if fmt == "mxfp4" else lax.bitcast_convert_type(query, jnp.float8_e4m3fn), *rest


def bits(scores):
    return lax.bitcast_convert_type(scores, jnp.uint32)


@pytest.mark.parametrize("fmt", cases.FORMATS)
@pytest.mark.parametrize(("sequences", "pages", "rows"), [(128, 256, 1), (3, 2048, 2), (300, 9, 1)])
def test_many_pages_a_cta_again_and_again(sequences, pages, rows, fmt):
    """More than a hundred pages for each CTA, and rows of few pages: a stage that changed hands
    would show after a while. Every run has the first one's bits."""
    operands = device_call(sequences, pages, fmt, rows=rows)
    operands = *operands[:-1], jnp.full(sequences * rows, pages * 64, jnp.int32)
    run = jax.jit(functools.partial(SCORES, cache_format=fmt))
    same = jax.jit(lambda left, right: jnp.all(bits(left) == bits(right)))
    first = run(*operands)
    assert all(bool(same(run(*operands), first)) for _ in range(40))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_a_row_does_not_depend_on_others(fmt):
    """Nor on the width of the table, nor on where pages lie: the same bits."""
    query, scale, weights, cache, _, _ = device_call(40, 30, fmt)
    table = jnp.arange(1200, dtype=jnp.int32).reshape(40, 30)
    lens = jnp.asarray(np.random.default_rng(0).integers(0, 1921, 40).astype(np.int32))
    all_rows = SCORES(query, scale, weights, cache, table, lens, cache_format=fmt)
    for row in (0, 17, 39):
        own = slice(row, row + 1)
        own_scale = None if scale is None else scale[own]
        alone = (query[own], own_scale, weights[own])
        got = SCORES(*alone, cache, table[own], lens[own], cache_format=fmt)
        assert_equal(bits(got), bits(all_rows[own]), f"row {row} alone")
    wide = jnp.pad(table, ((0, 0), (0, 100)), constant_values=-1)
    got = SCORES(query, scale, weights, cache, wide, lens, cache_format=fmt)
    assert_equal(bits(got[:, :1920]), bits(all_rows), "in a wider table")
    assert bool(jnp.isneginf(got[:, 1920:]).all())
    moved = jax.random.permutation(jax.random.key(1), 1200)
    place = jnp.argsort(moved).astype(jnp.int32)
    got = SCORES(query, scale, weights, cache[moved], place[table], lens, cache_format=fmt)
    assert_equal(bits(got), bits(all_rows), "with pages elsewhere")


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_replays_equal_eager_calls(fmt):
    """One recorded graph serves all lengths, tables and layers."""
    operands = device_call(9, 20, fmt, pages=64, layers=3, heads=16)
    rng = np.random.default_rng(0)

    def step(query, scale, weights, cache, table, lens, layer):
        weights = small.by_way_of_six_kernels(weights)
        return SCORES(query, scale, weights, cache, table, lens, layer, cache_format=fmt)

    step = jax.jit(step)
    for _ in range(200):
        table = jnp.asarray(rng.integers(-1, 65, (9, 20)), jnp.int32)
        lens = jnp.asarray(rng.integers(-2, 1300, 9), jnp.int32)
        layer = jnp.int32(rng.integers(-1, 4))
        arguments = *operands[:4], table, lens, layer
        want = SCORES(*arguments, cache_format=fmt)
        assert_equal(bits(step(*arguments)), bits(want), "scores")


@pytest.mark.parametrize("tries", [500])
def test_what_the_kernel_before_has_written_is_seen(tries):
    """Query, weights, cache, table and lengths are made right in front of the call."""
    query, _, weights, cache, table, _ = device_call(8, 16)
    raw = lax.bitcast_convert_type(query, jnp.uint8)

    def made(shift):
        lens = jnp.full(8, 1024, jnp.int32) - shift
        rolled = (jnp.roll(x, shift, axis=0) for x in (raw, weights, cache, table))
        return *rolled, lens

    def call(raw, weights, cache, table, lens):
        query = lax.bitcast_convert_type(raw, jnp.float8_e4m3fn)
        return SCORES(query, None, weights, cache, table, lens, cache_format="fp8")

    chained = jax.jit(lambda shift: call(*lax.optimization_barrier(made(shift))))
    want = [bits(call(*jax.jit(made)(jnp.int32(i)))) for i in range(8)]
    equal = [jnp.all(bits(chained(jnp.int32(i % 8))) == want[i % 8]) for i in range(tries)]
    assert np.asarray(jnp.stack(equal)).all()


def test_65536_sequences():
    operands = device_call(65536, 2, pages=500, heads=8)
    got = SCORES(*operands, cache_format="fp8")
    want = dsa.index_scores(*operands, cache_format="fp8", implementation="jnp")
    assert bool((jnp.isneginf(got) == jnp.isneginf(want)).all())
    inside = ~(jnp.isneginf(want) | jnp.isnan(want))
    off = jnp.where(inside, jnp.abs(got - want), 0)
    assert float(jnp.max(off)) <= 1e-3 * float(jnp.max(jnp.where(inside, jnp.abs(want), 0)))


def test_more_than_2_to_the_31_scores_and_a_cache_past_4_gib():
    """The last rows and pages are right; 8.6 GB of scores."""
    pages, batch, table_pages = 2**19 + 5, 1040, 2**15
    cache = jax.jit(lambda: jnp.full((pages, 64, 132), 0x38, jnp.uint8))()  # 4.4 GB of ones
    own = device_call(1, 1)[3][0]
    cache = jax.jit(lambda c, p: c.at[-1].set(p), donate_argnums=0)(cache, own)
    query, _, weights, *_ = device_call(batch, 1, pages=1)
    table = jnp.full((batch, table_pages), pages - 1, jnp.int32)
    lens = jnp.zeros(batch, jnp.int32).at[-1].set(table_pages * 64).at[0].set(64)
    got = SCORES(query, None, weights, cache, table, lens, cache_format="fp8")
    assert got.size > 2**31
    few = query[-1:], None, weights[-1:], own[None], jnp.zeros((1, 1), jnp.int32)
    want = SCORES(*few, jnp.array([64], jnp.int32), cache_format="fp8")
    assert_equal(bits(got[-1, -64:]), bits(want[0]), "the last page")
    assert_equal(bits(got[-1, :64]), bits(want[0]), "the first page")
    assert bool(jnp.isneginf(got[0, 64:]).all()) and bool(jnp.isneginf(got[1:-1]).all())


def test_none_takes_the_kernel_where_it_fits():
    operands = device_call(2, 3)
    explanation = dsa.explain(dsa.index_scores, *operands, cache_format="fp8")
    assert explanation.implementation == "cuda", explanation
    text = (
        jax.jit(functools.partial(dsa.index_scores, cache_format="fp8")).lower(*operands).as_text()
    )
    assert text.count("stablehlo.custom_call @jax_dsa_front.index_scores.v1(") == 1
    odd = device_call(2, 3, heads=5)
    explanation = dsa.explain(dsa.index_scores, *odd, cache_format="fp8")
    assert explanation.implementation == "jnp" and "H = 5" in explanation.reason


def test_a_cache_at_an_odd_place_of_a_larger_array_is_right():
    """The barrier in front of the call has XLA copy it to where the copy engine can read it."""
    query, _, weights, cache, table, lens = device_call(2, 3)
    flat = jnp.concatenate([jnp.zeros(4, jnp.uint8), cache.reshape(-1)])
    rest = query, None, weights, table, lens

    def of_slice(flat, query, scale, weights, table, lens):
        own = flat[4:].reshape(cache.shape)
        return SCORES(query, scale, weights, own, table, lens, cache_format="fp8")

    sliced = jax.jit(of_slice)
    want = SCORES(query, None, weights, cache, table, lens, cache_format="fp8")
    assert_equal(bits(sliced(flat, *rest)), bits(want), "scores of a slice")
