"""Judging results: what must be equal is compared as bits, the rest by the rule stated here.

Weights and scales must be equal. A query byte may differ from the float64 oracle only where the
projection lies so near a rounding boundary that another order of summation honestly takes the
neighbour, and at most one byte in a thousand may (`assert_query_share` says what that means where
there are few). Cache bytes: at most one in a hundred, by one code. Every byte that the definition
leaves alone must be as it was.
"""

import jax
import numpy as np

import oracle

QUERY_EQUAL, CACHE_EQUAL = 0.999, 0.99
FEW = 2  # sums in another order change one byte in 1e5 (CPU) or 1e4: more than two in 1 KB are rare
FEW_ROWS = 32  # one row can move 2.5 % of its bytes; below this that is more than the share allows


def as_float32(array):
    """Any JAX or NumPy float array as NumPy float32 (bfloat16 widens exactly)."""
    return np.asarray(array).astype(np.float32)


def as_bytes(array):
    """The bytes of an array, the last axis growing by the item size."""
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(np.uint8).reshape(*array.shape[:-1], array.shape[-1] * array.dtype.itemsize)


def where(bad, got, want):
    """The first few differing positions, for a failure message."""
    at = [tuple(map(int, index)) for index in np.argwhere(bad)[:6]]
    listed = ", ".join(f"{i}: {got[i]} instead of {want[i]}" for i in at)
    return f"{int(bad.sum())} of {bad.size} differ, at {listed}"


def assert_equal(got, want, name):
    """Bit-for-bit equality with positions in the message; NaN equals NaN of the same bits."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{name}: {got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    )
    if got.size:
        got, want = (a.reshape(1) if a.ndim == 0 else a for a in (got, want))
        got, want = as_bytes(got), as_bytes(want)
        bad = got != want
        assert not bad.any(), f"{name}, as bytes: {where(bad, got, want)}"


def assert_same_front(got, want):
    """Two results of `index_front` are the same, bit for bit."""
    for name in ("query", "query_scale", "weights", "cache"):
        left, right = getattr(got, name), getattr(want, name)
        assert (left is None) == (right is None), f"{name}: only one of the two is None"
        if left is not None:
            assert_equal(left, right, name)


def assert_same_as_eager(compiled, program, args, fmt):
    """`compiled(*args)` is `program(*args, fmt)` run call by call, bit for bit; its leaves."""
    with jax.disable_jit():
        want = jax.tree.leaves(program(*args, fmt))
    got = jax.tree.leaves(compiled(*args))
    for left, right in zip(got, want, strict=True):
        assert_equal(left, right, program.__name__)
    return got


def assert_share(equal, share, name, message):
    """At least `share` of `equal` is true; where that allows none or one, `FEW` may be false."""
    wrong = int(equal.size - equal.sum())
    allowed = max(int((1 - share) * equal.size), FEW)
    assert wrong <= allowed, f"{name}: {wrong} > {allowed} bytes off; {message}"


def assert_query_share(bad, torn, message):
    """At least QUERY_EQUAL of the bytes agree.

    An activation between two bfloat16 values that fp32 rounds to the other one moves up to 2.5 % of
    all bytes of its row. Many rows drown that. In few rows ([rows, ...]) only the bytes are judged
    that no such activation decides; the others still have to lie in the oracle's range.
    """
    judged = bad & ~torn if len(bad) < FEW_ROWS else bad
    assert_share(~judged, QUERY_EQUAL, "query", message)


def assert_weights(got, want):
    """Equal values; NaN where NaN is wanted."""
    got = as_float32(got)
    bad = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    assert got.shape == want.shape and not bad.any(), f"weights: {where(bad, got, want)}"


def assert_query(front, want, cache_format):
    """Query and its scale against the oracle's `Expected`."""
    got = as_bytes(front.query) if want.query.size else np.asarray(front.query).view(np.uint8)
    assert got.shape == want.query.shape, f"query: {got.shape} instead of {want.query.shape}"
    if cache_format == "mxfp4":
        scale = np.asarray(front.query_scale)
        assert_equal(scale, want.query_scale.astype(np.uint32), "query_scale")
        finite = np.repeat(want.query_exponent != 0xFF - 127, 16, -1)  # 16 bytes hold a group
    else:
        assert front.query_scale is None
        spoilt = (want.query & 0x7F) == oracle.FLOAT8_NAN
        assert (((got & 0x7F) == oracle.FLOAT8_NAN) == spoilt).all(), "query: NaN codes misplaced"
        finite = ~spoilt
    bad = (got != want.query) & finite
    code = oracle.rank(got, cache_format)
    outside = (code < want.lowest) | (code > want.highest)
    outside &= np.repeat(finite, 2, -1) if cache_format == "mxfp4" else finite
    assert not outside.any(), f"query codes past any rounding: {where(outside, code, want.lowest)}"
    assert_query_share(bad, want.torn, where(bad, got, want.query))


def assert_cache(got, before, want, cache_format):
    """The updated cache against the oracle's, which also says how many rows wrote each token."""
    got, before = np.asarray(got), np.asarray(before)
    assert (got.shape, got.dtype) == (before.shape, np.dtype(np.uint8))
    assert_untouched(got, before, want.rows > 0)
    once = want.rows == 1  # a slot that rows share has unspecified bytes
    values, scales = (part[once] for part in oracle.split_page(got))
    want_values, want_scales = (part[once] for part in oracle.split_page(want.cache))
    if cache_format == "mxfp4":
        spoilt = np.repeat(want_scales == 0xFF, 16, -1)  # 16 bytes hold a group; nibbles are free
        loose = np.zeros_like(want_scales, bool)
    else:
        spoilt = (want_values & 0x7F) == oracle.FLOAT8_NAN
        assert (((values & 0x7F) == oracle.FLOAT8_NAN) == spoilt).all(), (
            "cache: NaN codes misplaced"
        )
        loose = spoilt.any(-1, keepdims=True)  # the scale of a NaN key says nothing
    bad = (scales != want_scales) & ~loose
    assert not bad.any(), f"cache scales: {where(bad, scales, want_scales)}"
    bad = (values != want_values) & ~spoilt
    assert_share(~bad, CACHE_EQUAL, "cache values", where(bad, values, want_values))
    step = np.abs(oracle.rank(values, cache_format) - oracle.rank(want_values, cache_format))
    step *= np.repeat(bad, 2, -1) if cache_format == "mxfp4" else bad
    assert step.max(initial=0) <= 1, f"cache values off by {step.max()} codes"


def assert_untouched(got, before, written):
    """Outside the `written` tokens (bool [..., pages, page_size]) every byte is as it was."""
    for name, new, old in zip(
        ("values", "scales"), oracle.split_page(got), oracle.split_page(before), strict=True
    ):
        bad = (new != old) & ~written[..., None]
        assert not bad.any(), f"untouched cache {name} changed: {where(bad, new, old)}"


def assert_front(front, before, want, cache_format):
    """A whole result of `index_front` against the oracle; `before` is the cache passed in."""
    assert_weights(front.weights, want.weights)
    assert_query(front, want, cache_format)
    assert_cache(front.cache, before, want, cache_format)
