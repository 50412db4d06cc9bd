"""The kernel's numbers: against the oracle, against the jnp form, against itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jax_dsa_front as dsa
import oracle
import small
from compare import (
    as_bytes,
    assert_cache,
    assert_equal,
    assert_front,
    assert_query_share,
    assert_same_front,
    where,
)

pytestmark = pytest.mark.gpu
LARGEST = 128  # rows of the walk over batches
# A row's bytes depend neither on B nor on its place inside these ranges of B, whatever the number
# of launches and the tile (docs/kernels.md, "Which kernel").
RANGES = ((1, 8), (9, 300))


@pytest.mark.parametrize("case", cases.KERNEL_GRID, ids=str)
def test_kernel_equals_oracle_and_jnp(case):
    operands = cases.make(case)
    want = operands.expected(oracle)
    kernel = cases.run(case, operands, "cuda")
    assert_front(kernel, operands.cache, want, case.fmt)
    assert_like(kernel, cases.run(case, operands, "jnp"), operands.cache, want, case.fmt)


def assert_like(kernel, jnp_form, before, want, fmt):
    """Scales and weights equal, query bytes to 99.9 %, cache bytes to 99 % and one code."""
    assert_equal(kernel.weights, jnp_form.weights, "weights")
    if fmt == "mxfp4":
        assert_equal(kernel.query_scale, jnp_form.query_scale, "query_scale")
    if kernel.query.size:
        got, other = as_bytes(kernel.query), as_bytes(jnp_form.query)
        assert_query_share(got != other, want.torn, where(got != other, got, other))
    cache = dataclasses.replace(want, cache=np.asarray(jnp_form.cache))
    assert_cache(kernel.cache, before, cache, fmt)


@pytest.mark.parametrize("fmt", cases.FORMATS)
@pytest.mark.parametrize("k", cases.KERNEL_WIDTHS)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_every_batch_from_1_to_128(heads, k, fmt):
    """Sixteen batches per program, so that the walk is bounded by the calls, not by compilation."""
    case = cases.Case(
        "walk", fmt, k=k, heads=heads, batch=LARGEST, pages=4, slots="distinct", align=8, seed=80
    )
    operands = cases.make(case)
    want = operands.expected(oracle)
    cache, (projected, *parameters, slots), *_ = cases.arrays(case, operands)

    @jax.jit
    def fronts(projected, parameters, cache, slots, first):
        rows = [slice(None, first.shape[0] + i) for i in range(16)]
        return [
            dsa.index_front(
                projected[r], *parameters, cache, slots[r], **operands.static, implementation="cuda"
            )
            for r in rows
        ]

    for first in range(1, LARGEST + 1, 16):
        for i, front in enumerate(fronts(projected, parameters, cache, slots, jnp.zeros(first))):
            assert_first_rows(front, first + i, operands, want, case)


def assert_first_rows(front, batch, operands, want, case):
    """The call with the first `batch` rows against the oracle's call with all of them."""
    written = np.zeros(want.rows.shape, np.int64)
    written.reshape(-1)[operands.args[-1][:batch]] = 1
    cache = operands.cache.copy()
    for part, new in zip(oracle.split_page(cache), oracle.split_page(want.cache), strict=True):
        part[written == 1] = new[written == 1]
    scale = None if want.query_scale is None else want.query_scale[:batch]
    rows = ("query", "weights", "lowest", "highest", "torn", "query_exponent")
    expected = dataclasses.replace(
        want,
        cache=cache,
        rows=written,
        query_scale=scale,
        **{name: getattr(want, name)[:batch] for name in rows},
    )
    assert_front(front, operands.cache, expected, case.fmt)


@pytest.mark.parametrize("fmt", cases.FORMATS)
@pytest.mark.parametrize("batch", [1, 8, 9, 33, 64, 65, 128, 300])
def test_reruns_are_bit_identical(batch, fmt):
    case = cases.Case(
        "rerun", fmt, k=1536, heads=32, batch=batch, pages=6, slots="distinct", align=8, seed=81
    )
    operands = cases.make(case)
    first = cases.run(case, operands, "cuda")
    fn = jax.jit(cases.function(case, "cuda"))
    for _ in range(20):
        assert_same_front(fn(*cases.arrays(case, operands)), first)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("k", cases.KERNEL_WIDTHS)
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_batch_invariance(k, low, high, fmt):
    """Rows alone, in company and in reverse give the same bytes, inside one range of B."""
    case = cases.Case(
        "alone", fmt, k=k, heads=32, batch=high, pages=6, slots="distinct", align=8, seed=82
    )
    operands = cases.make(case)
    cache, (projected, *parameters, slots), *_ = cases.arrays(case, operands)
    call = jax.jit(
        lambda projected, slots: dsa.index_front(
            projected, *parameters, cache, slots, **operands.static, implementation="cuda"
        )
    )
    whole = call(projected, slots)
    reverse = call(projected[::-1], slots[::-1])
    assert_equal(reverse.cache, whole.cache, "cache, rows reversed")
    for name in ("query", "query_scale", "weights"):
        if getattr(whole, name) is not None:
            assert_equal(getattr(reverse, name)[::-1], getattr(whole, name), f"{name}, reversed")
    keys = dsa.read_keys(whole.cache, slots, cache_format=fmt)
    for batch in sorted({low, low + 1, min(64, high), min(65, high), min(129, high), high - 1}):
        start = (high - batch) // 2
        rows = slice(start, start + batch)
        part = call(projected[rows], slots[rows])
        assert_equal(part.query, whole.query[rows], f"query at B = {batch}")
        assert_equal(part.weights, whole.weights[rows], f"weights at B = {batch}")
        part_keys = dsa.read_keys(part.cache, slots[rows], cache_format=fmt)
        assert_equal(part_keys, keys[rows], f"keys at B = {batch}")


@pytest.mark.parametrize("fmt", cases.FORMATS)
@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
def test_slots_of_both_widths(slot_dtype, fmt):
    """Extremes of each type lie outside and write nothing; a layer's neighbours are guards."""
    case = cases.Case(
        "slots", fmt, k=1280, batch=12, stacked=cases.ALL, layer=1, traced_layer=True,
        slot_dtype=slot_dtype, slots="distinct", align=8, seed=83,
    )  # fmt: skip
    operands = cases.make(case)
    tokens = case.pages * case.page_size
    info = np.iinfo(slot_dtype)
    outside = [-1, tokens, 2 * tokens - 1, info.min, info.max, -tokens]
    if slot_dtype == "int64":
        outside[-2:] = [2**32, 2**32 + 3]  # their lower halves are tokens
    operands.args[-1][::2] = outside
    with jax.enable_x64(True):
        front = cases.run(case, operands, "cuda")
    assert_front(front, operands.cache, operands.expected(oracle), fmt)


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1, -(2**31), 2**32 + 1, 2**63 - 1, -(2**63)])
def test_layers_out_of_range_write_nothing(layer):
    """Of int32, and those of int64 whose lower halves are layers."""
    case = cases.Case(
        "layer", k=1280, stacked=cases.ALL, layer=layer, traced_layer=True, align=8, seed=84
    )
    operands = cases.make(case)
    with jax.enable_x64(True):
        front = cases.run(case, operands, "cuda")
    assert_equal(front.cache, operands.cache, "cache")
    assert_front(front, operands.cache, operands.expected(oracle), case.fmt)


def test_wq_b_at_an_odd_place_of_a_flat_array():
    """XLA hands the slice on where it lies; the refusal names the way out, which works."""
    projected, (gamma, wq_b, *norm), cache = small.operands(k=1536)
    want = small.step(projected, (gamma, wq_b, *norm), cache, jnp.arange(small.BATCH))
    flat = jnp.concatenate([jnp.zeros(3, jnp.bfloat16), wq_b.reshape(-1)])

    def call(flat, projected, cache, shield):
        own = shield(flat[3:]).reshape(wq_b.shape)
        return small.step(projected, (gamma, own, *norm), cache, jnp.arange(small.BATCH))

    call = jax.jit(call, static_argnums=3)
    assert_same_front(call(flat, projected, cache, lax.optimization_barrier), want)
    if jax.__version_info__ < (0, 11):
        assert_same_front(call(flat, projected, cache, lambda x: x), want)
        return
    says = "wq_b must be aligned to 16 bytes.*jax.lax.optimization_barrier"
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(call(flat, projected, cache, lambda x: x))
