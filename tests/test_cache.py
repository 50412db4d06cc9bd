"""The paged key cache: `empty_cache`, `read_keys`, `slots_of`, and what other kernels want."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import jax_dsa_front as dsa
import oracle
from compare import assert_equal
from filled_caches import PLATFORMS, each_integer, filled, nine_outside


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


def test_empty_cache_on_a_mesh():
    """Placed as asked, and of zeros."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    cache = dsa.empty_cache(4, 16, cache_format="fp8", layers=2, sharding=sharding)
    assert cache.sharding == sharding and cache.shape == (2, 4, 16, 132) and not cache.any()


def test_public_widths():
    for fmt, width in dsa.ROW_BYTES.items():
        assert dsa.empty_cache(1, 8, cache_format=fmt).shape == (1, 8, width)
    assert dsa.HEAD_DIM == 128 and list(dsa.ROW_BYTES) == ["fp8", "mxfp8", "mxfp4"]


def slots_by_hand(table, positions, page_size):
    """`slots_of` in Python's integers."""
    rows, found = len(positions) // len(table), []
    for row, position in enumerate(positions.reshape(len(positions), -1).tolist()):
        pages = table[row // rows].tolist()
        for p in position:
            inside = 0 <= p < len(pages) * page_size
            page = pages[p // page_size] if inside else -1
            slot = page * page_size + p % page_size
            found.append(slot if page >= 0 and slot < 2**31 else -1)
    return np.array(found, np.int32).reshape(positions.shape)


@each_integer
@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("shape", [(6,), (6, 5), (3, 2, 4), (2, 2**16)])
def test_slots_of(shape, page_size, dtype, x64):
    """One, two or three rows a sequence; positions and entries that are none among them."""
    rng = np.random.default_rng(len(shape) + page_size)
    sequences = 2 if shape[0] % 2 == 0 else 3
    table = rng.integers(-2, 50, (sequences, 9)).astype(dtype)
    table[0, :4] = np.iinfo(dtype).max, 2**31 - 1, 2**31 // page_size - 1, np.iinfo(dtype).min
    positions = rng.integers(-3, 9 * page_size + 3, shape).astype(dtype)
    flat = positions.reshape(-1)
    flat[:6] = np.iinfo(dtype).max, np.iinfo(dtype).min, 0, page_size, 2 * page_size, 9 * page_size
    want = slots_by_hand(table, positions, page_size)
    with jax.enable_x64(x64):
        got = dsa.slots_of(table, positions, page_size)
        assert got.dtype == jnp.int32
        assert_equal(got, want, "slots")
        jitted = jax.jit(dsa.slots_of, static_argnums=2)
        inside_jit = jitted(jnp.asarray(table), positions, page_size)
    if dtype == "int32":  # under jit JAX cuts NumPy's int64 before anyone sees it
        assert_equal(inside_jit, want, "slots under jit")


def test_slots_of_nothing():
    slots = dsa.slots_of(jnp.zeros((2, 0), int), jnp.zeros(4, int), 64)
    assert_equal(slots, np.full(4, -1, np.int32), "slots in a table without pages")
    for sequences, shape in ((0, (0,)), (3, (0,)), (2, (4, 0))):
        slots = dsa.slots_of(jnp.zeros((sequences, 2), int), jnp.zeros(shape, int), 64)
        assert_equal(slots, np.zeros(shape, np.int32), "no slots")


@pytest.mark.parametrize(
    ("arguments", "exception", "pattern"),
    [
        (
            dict(positions=np.zeros(3, int)),
            ValueError,
            r"block_table .*positions \(3\).*got \(2, 4\)",
        ),
        (dict(positions=np.int32(3)), TypeError, "positions .*array.*got int32"),
        (dict(positions=np.array(3)), ValueError, r"positions .*\(B, ...\), got \(\)"),
        (dict(positions=np.zeros(2)), TypeError, "positions .*int32 or int64, got float64"),
        (dict(block_table=np.zeros(4, int)), ValueError, r"block_table .*\(S, N\), got \(4,\)"),
        (
            dict(block_table=np.zeros((2, 4))),
            TypeError,
            "block_table .*int64, got float64",
        ),
        (dict(page_size=0), ValueError, "page_size .*got 0"),
        (
            dict(page_size=2**25, block_table=np.zeros((2, 64), int)),
            ValueError,
            r"block_table .*2147483647 positions.*got 64 \* 33554432",
        ),
        (dict(page_size=64.0), TypeError, "page_size .*int.*got float"),
    ],
    ids=["batch", "scalar", "rank", "dtype", "table", "table-dtype", "page", "length", "float"],
)
def test_slots_of_refuses(arguments, exception, pattern):
    good = dict(block_table=np.zeros((2, 4), int), positions=np.zeros(4, int), page_size=64)
    with pytest.raises(exception, match=pattern):
        dsa.slots_of(**good | arguments)


def test_results_are_what_deepgemm_and_vllm_take():
    """docs/integration.md's recipe: float32 weights, pages of 64 with the scales behind the values,
    the four-axis view, int32 lengths and tables."""
    case = cases.Case("peer", "fp8", slots="distinct", batch=16, seed=71, weights_dtype="float32")
    operands = cases.make(case)
    front = dsa.index_front(*map(jnp.asarray, operands.args), **operands.static)
    assert front.weights.dtype == jnp.float32 and front.query.dtype == jnp.float8_e4m3fn
    pages, page_size, width = front.cache.shape
    view = np.asarray(front.cache).reshape(pages, page_size, 1, width)
    assert view.strides == (page_size * width, width, width, 1)
    raw = view.reshape(pages, -1)  # values of all tokens, then an fp32 scale each
    keys = np.asarray(dsa.read_keys(front.cache, operands.args[-1], cache_format="fp8"))
    for slot, key in zip(operands.args[-1].tolist(), keys, strict=True):
        page, token = divmod(slot, page_size)
        codes = raw[page, token * 128 : token * 128 + 128].view(ml_dtypes.float8_e4m3fn)
        scale = raw[page, page_size * 128 + token * 4 :][:4].view("<f4")
        assert_equal(codes.astype(np.float32) * scale, key, f"key of slot {slot}")
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    assert dsa.slots_of(table, jnp.arange(3)[None], page_size).dtype == jnp.int32


@pytest.mark.parametrize(
    ("arguments", "exception", "pattern"),
    [
        (dict(pages=0), ValueError, "pages .*1.*got 0"),
        (dict(pages=2.0), TypeError, "pages .*int.*got float"),
        (dict(pages=2, page_size=0), ValueError, "page_size .*1.*got 0"),
        (dict(pages=2, page_size=2**25 + 1), ValueError, "page_size .*33554432, got 33554433"),
        (dict(pages=2**31 - 1), ValueError, "pages .*2147483646, got 2147483647"),
        (
            dict(pages=2, layers=2, page_size=1),
            ValueError,
            "page_size .*2 .*of layers.*got 1",
        ),
        (dict(pages=2, sharding="x"), TypeError, "sharding .*Sharding or None, got str"),
        (dict(pages=2, layers=0), ValueError, "layers .*1.*got 0"),
        (dict(pages=2, cache_format="fp16"), ValueError, "cache_format .*got 'fp16'"),
    ],
    ids=[
        "no-pages",
        "float",
        "no-tokens",
        "tokens",
        "pages",
        "one-token",
        "sharding",
        "no-layers",
        "format",
    ],
)
def test_empty_cache_refuses(arguments, exception, pattern):
    with pytest.raises(exception, match=pattern):
        dsa.empty_cache(**{"cache_format": "fp8"} | arguments)
