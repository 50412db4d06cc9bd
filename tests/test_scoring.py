"""From the front to a top-k: `index_scores`, `read_keys`, `empty_cache`, and the recall."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import fuzzing
import jax_dsa_front as dsa
import oracle
from compare import assert_equal

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
# Recall of the top-2048 of 65,536 keys against scores that were never quantised.
RECALL = {"fp8": 0.93, "mxfp8": 0.93, "mxfp4": 0.75}
# NumPy's int64 is narrowed before the call where JAX has no such type.
INTEGERS = [("int32", False), ("int64", True), ("int64", False)]
each_integer = pytest.mark.parametrize(
    ("dtype", "x64"), INTEGERS, ids=["int32", "int64", "int64-without-x64"]
)


def filled(fmt, page_size=16, pages=12, layers=2, batch=3, heads=4, seed=0):
    """(query, query_scale, weights, cache): the query of one call, a cache of well-formed keys."""
    rng = np.random.default_rng(seed)
    cache = np.zeros((layers, pages, page_size, cases.ROW[fmt]), np.uint8)
    keys = oracle.round_bf16(rng.standard_normal((layers * pages * page_size, 128)) * 3)
    values, scales = oracle.key_bytes(keys, np.ones(128), np.zeros(128), 1e-6, fmt)
    for part, new in zip(oracle.split_page(cache), (values, scales), strict=True):
        part[:] = new.reshape(part.shape)
    query = oracle.round_bf16(rng.standard_normal((batch, heads, 128)))
    weights = rng.standard_normal((batch, heads)).astype(np.float32)
    if fmt == "mxfp4":
        codes, exponents = oracle.quantise_mxfp4(query)
        return codes, exponents.view("<u4")[..., 0], weights, cache
    return oracle.quantise_fp8(query, 1e-10)[0], None, weights, cache


def nine_outside(dtype, size):
    """Integers outside [0, size); as many of each dtype, so that narrowed ones share a program."""
    return np.resize(np.array(fuzzing.extremes(dtype, size), dtype), 9)


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


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_read_keys_equals_oracle(fmt, platform):
    *_, cache = filled(fmt, page_size=7, seed=3)
    slots = np.array([[0, 6, 7], [83, 41, 6]], np.int32)
    for layer in (0, 1):
        want = oracle.keys(cache, slots, fmt, layer).astype(np.float32)
        got = dsa.read_keys(jnp.asarray(cache), jnp.asarray(slots), layer, cache_format=fmt)
        assert got.device.platform == platform
        assert_equal(got, want, "keys")
        traced = jax.jit(dsa.read_keys, static_argnames="cache_format")
        assert_equal(
            traced(jnp.asarray(cache), jnp.asarray(slots), jnp.int32(layer), cache_format=fmt),
            want,
            "keys under jit",
        )


@each_integer
@pytest.mark.parametrize("stacked", [False, True], ids=["unstacked", "stacked"])
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_keys_of_slots_that_do_not_exist_are_nan(fmt, stacked, dtype, x64):
    """Also where the next layer begins or the previous one ends; the slots beside them are read."""
    *_, cache = filled(fmt, page_size=7, seed=5)
    tokens = 12 * 7
    slots = np.array([0, *nine_outside(dtype, tokens), tokens - 1], dtype)
    for layer in (0, 1):
        pool = (cache, layer) if stacked else (cache[layer], None)
        with jax.enable_x64(x64):
            got = np.asarray(dsa.read_keys(pool[0], slots, pool[1], cache_format=fmt))
        assert np.isnan(got[1:-1]).all()
        want = oracle.keys(cache, slots[[0, -1]], fmt, layer).astype(np.float32)
        assert_equal(got[[0, -1]], want, "keys")


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_read_keys_decodes_every_byte(fmt):
    """A page whose value bytes run through 0..255 and whose scale is one."""
    width = cases.ROW[fmt] - 4
    cache = np.zeros((1, 256 // width * 2, width + 4), np.uint8)
    values, scales = oracle.split_page(cache)
    values.reshape(-1)[:] = np.resize(np.arange(256), values.size)
    scales[:] = [0, 0, 0x80, 0x3F] if fmt == "fp8" else 127
    slots = np.arange(cache.shape[1])
    got = dsa.read_keys(jnp.asarray(cache), jnp.asarray(slots), cache_format=fmt)
    np.testing.assert_array_equal(np.asarray(got), oracle.keys(cache, slots, fmt))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_empty_cache(fmt):
    for layers, lead in ((None, ()), (3, (3,))):
        cache = dsa.empty_cache(5, 16, cache_format=fmt, layers=layers)
        assert cache.shape == (*lead, 5, 16, cases.ROW[fmt]) and cache.dtype == jnp.uint8
        layer = None if layers is None else 2
        keys = dsa.read_keys(cache, jnp.arange(80), layer, cache_format=fmt)
        assert_equal(keys, np.zeros((80, 128), np.float32), "keys of an empty cache")
    assert dsa.empty_cache(2, cache_format=fmt).shape == (2, 64, cases.ROW[fmt])


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


def test_scale_bytes_of_an_mxfp8_cache_are_the_exponents_of_the_fp8_scales():
    """Same keys, same value bytes; only the four scale bytes differ, as defined."""
    case = cases.Case("pair", "fp8", slots="distinct", batch=16, seed=70)
    operands = cases.make(case)
    caches = []
    for fmt in ("fp8", "mxfp8"):
        static = operands.static | {"cache_format": fmt}
        caches.append(dsa.index_front(*map(jnp.asarray, operands.args), **static).cache)
    (values8, scales8), (valuesmx, scalesmx) = (
        (
            part[np.divmod(operands.args[-1], case.page_size)]
            for part in oracle.split_page(np.asarray(c))
        )
        for c in caches
    )
    assert_equal(valuesmx, values8, "values")
    exponent = np.ascontiguousarray(scales8).view(np.uint32) >> 23
    assert_equal(scalesmx, np.repeat(exponent, 4, 1).astype(np.uint8), "scales")
