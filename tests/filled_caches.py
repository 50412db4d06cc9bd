"""Caches of well-formed keys with a query to score them, and integers around their ends."""

import numpy as np
import pytest

import cases
import fuzzing
import oracle

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
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
