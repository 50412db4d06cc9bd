"""NaN and Inf stay where they are: one head or group of the query, one slot of the cache."""

import numpy as np
import pytest

import cases
import jax_dsa_front as dsa
import oracle
from compare import assert_equal, assert_front

NAMES = ("projected", "q_norm", "wq_b", "key_norm_weight", "key_norm_bias", "cache", "slots")
IMPLEMENTATIONS = ["jnp", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = [
    pytest.mark.parametrize("fmt", cases.FORMATS),
    pytest.mark.parametrize("implementation", IMPLEMENTATIONS),
]


def spoilt_call(fmt, implementation, *places):
    """(operands, result) of a call with each `(name, index, value)` put into its operands."""
    case = cases.Case("spoilt", fmt, k=1280, slots="distinct", seed=64)
    operands = cases.make(case)
    for name, index, value in places:
        operands.args[NAMES.index(name)][index] = value
    return operands, cases.run(case, operands, implementation)


def test_bad_rows_of_wq_b_spoil_their_heads_only(fmt, implementation):
    """That head (fp8) or that group of 32 columns (mxfp4), in every row; nothing else."""
    bad = {1: np.nan, 3: np.inf, 6: -np.inf}
    places = [("wq_b", (head * 128 + 70, 17), value) for head, value in bad.items()]
    operands, front = spoilt_call(fmt, implementation, *places)
    assert_front(front, operands.cache, operands.expected(oracle), fmt)
    weights = np.asarray(front.weights).astype(np.float32)
    if fmt == "mxfp4":
        scale = np.ascontiguousarray(front.query_scale).view(np.uint8).reshape(5, 8, 4)
        assert (scale[:, (1, 3, 6), 2] == 0xFF).all() and (scale == 0xFF).sum() == 5 * 3
        assert np.isfinite(weights).all()
    else:
        assert np.isnan(weights[:, (1, 3, 6)]).all() and np.isnan(weights).sum() == 5 * 3


def test_nan_in_one_row(fmt, implementation):
    """In q_a of row 2 (all its heads, not its key), in the key of row 1, in a weight of row 0."""
    key, weight = 1280, 1280 + 128
    places = [("projected", at, np.nan) for at in ((2, 5), (1, key + 9), (0, weight + 3))]
    operands, front = spoilt_call(fmt, implementation, *places)
    assert_front(front, operands.cache, operands.expected(oracle), fmt)
    spoilt = np.isnan(np.asarray(front.weights).astype(np.float32))
    assert spoilt[0].tolist() == [head == 3 for head in range(8)]
    assert not spoilt[[1, 3, 4]].any() and spoilt[2].all() == (fmt != "mxfp4")
    read = dsa.read_keys(front.cache, operands.args[-1], cache_format=fmt)
    assert np.isnan(np.asarray(read)).all(axis=1).tolist() == [False, True, False, False, False]


def test_infinite_keys_and_norms(fmt, implementation):
    """An infinite key element spoils its slot; an infinite norm weight or bias all of them."""
    operands, front = spoilt_call(fmt, implementation, ("projected", (3, 1280 + 64), -np.inf))
    assert_front(front, operands.cache, operands.expected(oracle), fmt)
    for name in ("key_norm_weight", "key_norm_bias"):
        operands, front = spoilt_call(fmt, implementation, (name, 100, np.inf))
        assert_front(front, operands.cache, operands.expected(oracle), fmt)


def test_overflowing_row_leaves_the_others_alone(fmt, implementation):
    """A row whose sum of squares overflows fp32 has no specified query; all else is unchanged."""
    _, clean = spoilt_call(fmt, implementation)
    _, front = spoilt_call(fmt, implementation, ("projected", (4, np.s_[:8]), 3e38))
    for name in ("query", "query_scale", "weights"):
        if getattr(front, name) is not None:
            assert_equal(getattr(front, name)[:4], getattr(clean, name)[:4], name)
    assert_equal(front.cache, clean.cache, "cache")
