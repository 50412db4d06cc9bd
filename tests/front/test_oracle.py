"""The jnp implementation against the float64 oracle, over the grid of `cases.GRID`."""

import jax
import numpy as np
import pytest

import cases
import jax_dsa_front as dsa
import oracle
from compare import (
    FEW,
    FEW_ROWS,
    assert_front,
    assert_query,
    assert_query_share,
    assert_same_front,
    assert_untouched,
)

# Compiled without optimisation in half the time; the whole model's shapes as users get them.
QUICK = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize("case", cases.GRID, ids=str)
def test_jnp_equals_oracle(case):
    operands = cases.make(case)
    options = None if case.k >= 1280 else QUICK
    front = cases.run(case, operands, "jnp", options)
    assert_front(front, operands.cache, operands.expected(oracle), case.fmt)
    assert str(front.weights.dtype) == case.weights_dtype
    assert str(front.query.dtype) == ("uint8" if case.fmt == "mxfp4" else "float8_e4m3fn")


def test_grid_names_are_unique():
    names = [case.name for case in cases.GRID]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("grid", [cases.GRID, cases.KERNEL_GRID], ids=["grid", "kernel"])
def test_odd_offsets_are_odd(grid):
    """Of the key and of the head weights, in `projected`; its rows are odd where they may be."""
    odd = [case for case in grid if case.name.startswith("odd-offsets")]
    assert {case.fmt for case in odd} == set(cases.FORMATS)
    for case in odd:
        key_offset, weight_offset, width = cases.columns(case)
        assert not (case.own_key or case.own_weights)
        assert key_offset % 2 == weight_offset % 2 == 1
        assert width % 2 == (case.align == 1)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_eager_and_numpy_operands_equal_jit(fmt):
    """Outside jit, and with NumPy arrays as they are: the same bytes."""
    case = cases.Case("eager", fmt, stacked=cases.ALL, layer=1, traced_layer=True, seed=60)
    operands = cases.make(case)
    want = cases.run(case, operands)
    assert_same_front(cases.function(case)(*cases.arrays(case, operands)), want)
    assert_same_front(dsa.index_front(*operands.args, np.int32(1), **operands.static), want)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_int64_slots(fmt):
    """Slots past 2**32 lie outside; none may wrap onto a token of the pool."""
    case = cases.Case("i64", fmt, batch=8, slot_dtype="int64", slots="distinct", seed=61)
    operands = cases.make(case)
    operands.args[-1][1::2] = [2**32, -(2**32), -(2**63), 2**63 - 1]
    with jax.enable_x64(True):
        assert cases.arrays(case, operands)[1][-1].dtype == np.int64
        front = cases.run(case, operands)
    assert_front(front, operands.cache, operands.expected(oracle), fmt)


@pytest.mark.parametrize("layer", [1, 2**31, 2**32 + 1, 2**63 - 1, -(2**32) + 1, -(2**63)])
def test_int64_layers(layer):
    """One that int32 cannot hold reads the nearest layer and stores nothing; none may wrap."""
    case = cases.Case("i64-layer", stacked=cases.ALL, layer=layer, traced_layer=True, seed=65)
    operands = cases.make(case)
    with jax.enable_x64(True):
        arrays = cases.arrays(case, operands)
        arrays = *arrays[:2], arrays[2].astype(np.int64), *arrays[3:]
        front = jax.jit(cases.function(case))(*arrays)
    assert_front(front, operands.cache, operands.expected(oracle), case.fmt)


def test_x64_changes_nothing():
    """Under jax_enable_x64 the same bytes come out, in the same dtypes."""
    case = cases.Case("x64", "mxfp4", stacked=cases.ALL, layer=1, traced_layer=True, seed=62)
    plain = cases.run(case)
    with jax.enable_x64(True):
        assert_same_front(cases.run(case), plain)


def test_debug_nans_accepts_finite_input():
    """jax_debug_nans looks at results only; nothing inside makes a NaN that it could trip on."""
    case = cases.Case("debug", style="zero", seed=63)
    want = cases.run(case)
    with jax.debug_nans(True):
        assert_same_front(cases.function(case)(*cases.arrays(case, cases.make(case))), want)


def test_comparison_would_notice():
    """The rule of comparison itself: one wrong byte, scale or untouched byte is reported."""
    case = cases.Case("mutant", batch=8, seed=68)
    operands = cases.make(case)
    front, want = cases.run(case, operands), operands.expected(oracle)
    written = np.argwhere(want.rows == 1)[0]
    untouched = np.argwhere(want.rows == 0)[0]
    query = np.array(front.query).view(np.uint8)
    query[1, 2, 3] ^= 0x08  # one step of the exponent
    with pytest.raises(AssertionError, match="past any rounding"):
        assert_query(front._replace(query=query.view(front.query.dtype)), want, case.fmt)
    for at, match in ((written, "cache"), (untouched, "untouched")):
        cache = np.array(front.cache)
        oracle.split_page(cache)[1][tuple(at)] ^= 1
        with pytest.raises(AssertionError, match=match):
            assert_front(front._replace(cache=cache), operands.cache, want, case.fmt)
    with pytest.raises(AssertionError, match="untouched"):
        assert_untouched(cache, operands.cache, want.rows > 0)


@pytest.mark.parametrize(
    ("rows", "allowed", "torn_allowed"),
    [(1, FEW, 1024), (FEW_ROWS - 1, 31, (FEW_ROWS - 1) * 1024), (FEW_ROWS, 32, 32)],
)
def test_share_of_query_bytes(rows, allowed, torn_allowed):
    """A byte in a thousand, a few in one row; torn bytes count in many rows only."""
    shape = rows, 8, 128
    at = np.arange(rows * 1024).reshape(shape)
    for torn, most in ((False, allowed), (True, torn_allowed)):
        assert_query_share(at < most, np.full(shape, torn), "")
        if most < at.size:
            with pytest.raises(AssertionError, match=f"{most + 1} > {most} bytes off"):
                assert_query_share(at <= most, np.full(shape, torn), "")
