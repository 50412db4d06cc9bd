"""`index_scores` against the oracle and recorded scores, and the recall of the chain in front."""

import functools
import pathlib

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import jax_dsa_front as dsa
import oracle
from compare import assert_equal
from filled_caches import PLATFORMS, each_integer, filled, nine_outside
from golden import score_inputs
from jax_dsa_front._scores import reference
from jax_dsa_front._scores.config import ScoresConfig

# Recall of the top-2048 of 65,536 keys against scores that were never quantised.
RECALL = {"fp8": 0.93, "mxfp8": 0.93, "mxfp4": 0.75}


def as_query(codes, fmt):
    return jnp.asarray(codes if fmt == "mxfp4" else codes.view(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize(
    ("weights_dtype", "traced"), [("float32", False), ("bfloat16", True)], ids=["eager", "jit"]
)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_scores_equal_float64(fmt, platform, weights_dtype, traced):
    codes, scale, weights, cache = filled(fmt)
    weights = weights.astype(np.dtype(weights_dtype))
    table = np.array([[3, 0, 7], [11, 3, 5], [1, 2, 4]], np.int32)
    lens = np.array([48, 17, 0], np.int32)  # full, ending inside a page, empty
    scorer = jax.jit(dsa.index_scores, static_argnames="cache_format")
    layer = jnp.int32(1) if traced else 1
    if not traced:
        scorer = dsa.index_scores
    got = scorer(
        as_query(codes, fmt), scale, jnp.asarray(weights), jnp.asarray(cache), jnp.asarray(table),
        jnp.asarray(lens), layer, cache_format=fmt,
    )  # fmt: skip
    want = oracle.scores(codes, scale, weights.astype(np.float32), cache, table, lens, fmt, 1)
    assert got.device.platform == platform
    assert got.dtype == jnp.float32 and got.shape == (3, 48)
    inside = np.isfinite(want)
    assert (np.isneginf(got) == ~inside).all()
    np.testing.assert_allclose(np.asarray(got)[inside], want[inside], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_unstacked_cache_scores_like_its_layer(fmt):
    codes, scale, weights, cache = filled(fmt, seed=1)
    table, lens = jnp.array([[2, 9]] * 3), jnp.array([32, 31, 1])
    args = as_query(codes, fmt), scale, jnp.asarray(weights)
    stacked = dsa.index_scores(*args, jnp.asarray(cache), table, lens, 1, cache_format=fmt)
    alone = dsa.index_scores(*args, jnp.asarray(cache[1]), table, lens, cache_format=fmt)
    assert_equal(stacked, alone, "scores")


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_pages_past_the_length_do_not_matter(fmt):
    """Block tables are padded with anything; NaN in a page that no row reaches stays there."""
    codes, scale, weights, cache = filled(fmt, seed=2)
    spoilt = cache.copy()
    spoilt[0, 9] = 0xFF
    lens = jnp.array([16, 3, 16])
    args = as_query(codes, fmt), scale, jnp.asarray(weights)
    want = dsa.index_scores(
        *args, jnp.asarray(cache[0]), jnp.array([[2, 1]] * 3), lens, cache_format=fmt
    )
    for table in ([[2, 9]] * 3, [[2, -1]] * 3, [[2, 2**31 - 1]] * 3):
        got = dsa.index_scores(
            *args, jnp.asarray(spoilt[0]), jnp.array(table), lens, cache_format=fmt
        )
        assert_equal(got, want, "scores")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_a_spoilt_key_scores_nan(fmt, platform):
    """It and no other, in every row; also if its NaN is in the codes alone. Sixteen pages of 64:
    in smaller products XLA on CPU kept the NaN of a maximum, too."""
    codes, scale, weights, cache = filled(fmt, page_size=64, pages=16, layers=1, heads=8)
    values, scales = oracle.split_page(cache)
    spoilt = scales if fmt == "mxfp4" else values  # e2m1 has no NaN
    spoilt[0, 1, 5] = 0xFF
    table, lens = np.tile(np.arange(16), (3, 1)), np.full(3, 1024)
    args = as_query(codes, fmt), scale, weights, cache[0], table, lens
    got = dsa.index_scores(*args, cache_format=fmt)
    assert got.device.platform == platform
    assert np.argwhere(np.isnan(got)).tolist() == [[row, 64 + 5] for row in range(3)]


@each_integer
@pytest.mark.parametrize("stacked", [False, True], ids=["unstacked", "stacked"])
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_tokens_of_no_page_score_minus_infinity(fmt, stacked, dtype, x64):
    """One entry in each row of the block table is no page. Its tokens are within the length; those
    of the other pages score what they score where that entry is a page."""
    codes, scale, weights, cache = filled(fmt, batch=9, seed=4)
    row = np.arange(9)
    pages = np.array([[3, 0, 11]] * 9, dtype)
    spoilt = pages.copy()
    spoilt[row, row % 3] = nine_outside(dtype, 12)
    lens = (48 - row).astype(np.int32)  # the last page whole, and ending inside it
    for layer in (0, 1):
        pool = (cache, layer) if stacked else (cache[layer], None)
        with jax.enable_x64(x64):
            args = as_query(codes, fmt), scale, weights, pool[0]
            got, known = (
                dsa.index_scores(*args, table, lens, pool[1], cache_format=fmt)
                for table in (spoilt, pages)
            )
        assert (np.isfinite(known) == (np.arange(48) < lens[:, None])).all()
        want = np.where(np.repeat(spoilt != pages, 16, axis=1), -np.float32(np.inf), known)
        assert_equal(got, want, "scores")


def attention_problem(tokens, heads, k, seed=0):
    """(keys bf16 [tokens, 128], q_a bf16 [k], wq_b bf16 [heads*128, k]): a head's worth of search.

    Keys fall into 64 clusters with noise half as large; four channels are twelve times the rest.
    Each head's query is some cluster's centre (before those channels grow) with the same noise:
    wq_b sends this q_a there.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    centres = normal(64, 128)
    keys = centres[rng.integers(0, 64, tokens)] + 0.5 * normal(tokens, 128)
    keys[:, rng.choice(128, 4, replace=False)] *= 12
    q_a = normal(k)
    q_a /= np.sqrt((q_a * q_a).mean())
    targets = centres[rng.integers(0, 64, heads)].reshape(-1, 1)
    wq_b = targets * q_a / k + 0.5 * normal(heads * 128, k) * k**-0.5
    return (x.astype(ml_dtypes.bfloat16) for x in (keys, q_a, wq_b))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_recall_of_the_top_2048(fmt):
    """Front, cache and scorer end to end, against float32 scores of unquantised query and keys."""
    tokens, heads, k, page_size, count = 65536, 32, 256, 64, 2048
    keys, q_a, wq_b = attention_problem(tokens, heads, k)
    w = np.random.default_rng(1).standard_normal(heads, dtype=np.float32)
    rows = np.tile(q_a, (8192, 1))
    head_weights = np.tile(w, (8192, 1))

    @functools.partial(jax.jit, donate_argnums=3)
    def front(rows, head_weights, wq_b, cache, keys, slots):
        return dsa.index_front(
            rows, np.ones(k, ml_dtypes.bfloat16), wq_b, np.ones(128, np.float32),
            np.zeros(128, np.float32), cache, slots, key=keys, head_weights=head_weights,
            key_offset=0, weight_offset=0, eps=1e-6, key_eps=1e-6, cache_format=fmt,
            weights_dtype=jnp.float32,
        )  # fmt: skip

    cache = dsa.empty_cache(tokens // page_size, page_size, cache_format=fmt)
    for slots in np.arange(tokens, dtype=np.int32).reshape(-1, 8192):  # one head: the keys matter
        cache = front(rows, head_weights, wq_b[:128], cache, keys[slots], slots).cache
    last = np.array([tokens - 1], np.int32)
    query, scale, weights, cache = front(rows[:1], head_weights[:1], wq_b, cache, keys[-1:], last)
    pages, lens = jnp.arange(tokens // page_size)[None], jnp.array([tokens])
    scores = dsa.index_scores(query, scale, weights, cache, pages, lens, cache_format=fmt)

    exact = exact_scores(*(x.astype(np.float32) for x in (q_a, wq_b, keys)), w)
    top, best = (np.argpartition(-np.asarray(x).ravel(), count)[:count] for x in (scores, exact))
    recall = len(np.intersect1d(top, best)) / count
    assert recall >= RECALL[fmt], recall


def exact_scores(q_a, wq_b, keys, weights):
    """float32 scores [tokens] without any rounding of query or keys."""
    query = (wq_b @ (q_a / np.sqrt((q_a * q_a).mean()))).reshape(-1, 128)
    keys = keys - keys.mean(-1, keepdims=True)
    keys /= np.sqrt((keys * keys).mean(-1, keepdims=True) + 1e-6)
    return np.maximum(keys @ query.T, 0) @ weights


RECORDED = np.load(pathlib.Path(__file__).parents[1] / "golden" / "scores_deepgemm.npz")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", score_inputs.CASES)
def test_scores_that_deepgemm_recorded(case, platform):
    """Its FP8 tensor core keeps fewer bits of the sums: within 5e-4 of the largest of a case."""
    inputs = score_inputs.make(*score_inputs.CASES[case])
    query = inputs["query"].view(ml_dtypes.float8_e4m3fn)
    rest = (inputs[name] for name in ("weights", "cache", "block_table", "context_lens"))
    got = dsa.index_scores(query, None, *rest, cache_format="fp8")
    assert got.device.platform == platform
    want = RECORDED[case]
    assert got.shape == want.shape
    inside = np.arange(want.shape[1]) < inputs["context_lens"][:, None]
    assert (np.isneginf(got) == ~inside).all()
    got, want = np.asarray(got)[inside], want[inside]
    off = np.abs(got - want).max() / np.abs(want).max()
    assert off <= 5e-4, off


CONFIG = ScoresConfig("fp8", layer=None, implementation=None, has_layer_operand=False)
SCORER = jax.jit(functools.partial(dsa.index_scores, cache_format="fp8"))
JNP_FORM = jax.jit(functools.partial(dsa.index_scores, cache_format="fp8", implementation="jnp"))


@pytest.mark.parametrize("fmt", cases.FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 130])
def test_rows_of_a_sequence_share_its_pages(rows, fmt):
    """The table has one row a sequence; scores are those of the same table, repeated."""
    codes, scale, weights, cache = filled(fmt, batch=2 * rows, pages=30, layers=1, seed=rows)
    rng = np.random.default_rng(rows)
    table = rng.permutation(30)[:24].reshape(2, 12).astype(np.int32)
    lens = rng.integers(0, 193, 2 * rows).astype(np.int32)
    lens[0] = 192
    args = as_query(codes, fmt), scale, weights, cache[0]
    got = dsa.index_scores(*args, table, lens, cache_format=fmt)
    repeated = np.repeat(table, rows, axis=0)
    want = oracle.scores(codes, scale, weights, cache[0][None], repeated, lens, fmt, 0)
    inside = np.isfinite(want)
    assert (np.isneginf(got) == ~inside).all()
    np.testing.assert_allclose(np.asarray(got)[inside], want[inside], rtol=1e-4, atol=1e-3)


def long_call(batch, heads=32, table_pages=300, sequences=None):
    """(query, weights, cache, block_table) of fp8 scores; the keys' codes are around one."""
    rng = np.random.default_rng(0)
    sequences = sequences or batch
    cache = np.zeros((64, 64, 132), np.uint8)
    values, scales = oracle.split_page(cache)
    values[:] = rng.integers(0x30, 0x40, values.shape)
    scales[:] = np.exp2(rng.integers(-3, 3, (64, 64, 1))).astype("<f4").view(np.uint8)
    query = rng.standard_normal((batch, heads, 128)).astype(ml_dtypes.float8_e4m3fn)
    weights = rng.standard_normal((batch, heads)).astype(np.float32)
    return query, weights, cache, rng.integers(0, 64, (sequences, table_pages)).astype(np.int32)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("batch", "sequences"), [(3, 3), (130, 1)])
def test_several_pieces(batch, sequences, platform):
    """More pages than a piece has, the last piece reaching back; rows in pieces as well."""
    query, weights, cache, table = long_call(batch, sequences=sequences)
    lens = np.linspace(300 * 64, 300 * 64 - 5000, batch).astype(np.int32)
    got = JNP_FORM(query, None, weights, cache, table, lens)
    assert got.device.platform == platform
    rows = [0, batch // 2, batch - 1]
    repeated = np.repeat(table, batch // sequences, axis=0)[rows]
    codes = query.view(np.uint8)[rows]
    want = oracle.scores(codes, None, weights[rows], cache[None], repeated, lens[rows], "fp8", 0)
    inside, found = np.isfinite(want), np.asarray(got)[rows]
    assert (np.isneginf(found) == ~inside).all()
    np.testing.assert_allclose(found[inside], want[inside], rtol=1e-4, atol=1e-2)


def test_memory_is_bounded():
    """512 rows of one sequence of 128k: 64 MB of scratch at most, beside results of 268 MB."""
    query, weights, cache, table = long_call(512, 64, 2048, sequences=1)
    operands = query, None, weights, cache, table, np.zeros(512, np.int32)
    memory = SCORER.lower(*operands).compile().memory_analysis()
    assert memory.output_size_in_bytes == 512 * 2048 * 64 * 4
    assert memory.temp_size_in_bytes <= 64e6, memory.temp_size_in_bytes


def test_turns_follow_the_longest_length():
    """Pieces of 4,096 tokens are read while a row of the sequence is longer, and no more."""
    reads, read = [], reference._read_pages

    def counted(*args):
        jax.debug.callback(lambda: reads.append(1), ordered=True)
        return read(*args)

    operands = long_call(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_read_pages", counted)
        scorer = jax.jit(lambda *args: reference.reference_scores(CONFIG, *args)[0])
        for lengths, turns in (((0, 0), 0), ((1, 0), 1), ((4096, 4097), 3), ((19200, 64), 6)):
            reads.clear()
            jax.block_until_ready(scorer(*operands, np.array(lengths, np.int32)))
            jax.effects_barrier()
            assert len(reads) == turns, (lengths, len(reads))


def test_export_with_symbolic_sizes():
    """B = 3 * s by construction; independent symbols are refused."""
    names, bounds = "s, b, pages, entries", ["pages <= 1000000", "entries <= 1000000"]
    s, b, pages, entries = jax.export.symbolic_shape(names, constraints=bounds)

    def shapes(batch, sequences):
        return (
            jax.ShapeDtypeStruct((batch, 8, 128), jnp.float8_e4m3fn), None,
            jax.ShapeDtypeStruct((batch, 8), jnp.float32),
            jax.ShapeDtypeStruct((pages, 64, 132), jnp.uint8),
            jax.ShapeDtypeStruct((sequences, entries), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        )  # fmt: skip

    exported = jax.export.export(SCORER, platforms=["cpu"])(*shapes(3 * s, s))
    query, weights, cache, table = long_call(6, 8, 20, sequences=2)
    operands = query, None, weights, cache, table, np.array([1280, 0, 64, 65, 1, 700], np.int32)
    got, want = exported.call(*operands), SCORER(*operands)
    assert (np.isneginf(got) == np.isneginf(want)).all()
    numbers = (np.nan_to_num(x, neginf=0) for x in (got, want))
    np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-3)
    with pytest.raises(ValueError, match=r"block_table .*a divisor"):
        jax.export.export(SCORER, platforms=["cpu"])(*shapes(b, s))


def test_refused_transforms():
    """As the front does; what to fold is named."""
    operands = [jnp.asarray(x) for x in long_call(2, 8, 4)]
    lens = jnp.array([200, 9])

    def scores(weights):
        return SCORER(operands[0], None, weights, *operands[2:], lens)

    with pytest.raises(NotImplementedError, match=r"index_scores .*inference.*stop_gradient"):
        jax.grad(lambda w: scores(w)[0, 0])(operands[1])
    with pytest.raises(NotImplementedError, match=r"index_scores .*vmap.*fold .*block_table"):
        jax.vmap(scores)(jnp.stack([operands[1]] * 2))


def test_one_short_equation_and_an_explanation():
    operands = [jnp.asarray(x) for x in long_call(2, 8, 4)]
    arguments = operands[0], None, *operands[1:], jnp.array([200, 9])
    jaxpr = jax.make_jaxpr(functools.partial(dsa.index_scores, cache_format="fp8"))(*arguments)
    (equation,) = jaxpr.eqns
    assert equation.primitive.name == "index_scores" and len(str(equation)) < 300
    assert dsa.explain(dsa.index_scores, *arguments, cache_format="fp8").implementation == "jnp"
    with pytest.raises(NotImplementedError, match=r'^implementation="cuda" cannot run'):
        dsa.index_scores(*arguments, cache_format="fp8", implementation="cuda")
