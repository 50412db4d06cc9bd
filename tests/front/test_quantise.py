"""Quantisation of every bfloat16 value and under every maximum, bit for bit.

Three rungs: the oracle's table search against ml_dtypes' casts; the jnp quantisers against the
oracle; and whole calls, built so that a chosen bfloat16 value reaches a chosen query or key
element exactly, which is the form that also runs on the kernel.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import exact_calls
import oracle
from cases import BF16
from compare import as_bytes, assert_equal
from exact_calls import FINITE, groups_of_every_maximum, groups_with_maximum
from jax_dsa_front._front import reference

NORMAL = FINITE[(np.abs(FINITE) >= 2.0**-126) | (FINITE.view(np.uint32) == 0)]
IMPLEMENTATIONS = ["jnp", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_oracle_round_bf16_equals_ml_dtypes():
    """Every bfloat16, each tie between two, and the fp32 numbers just beside that tie."""
    bits = np.arange(65536, dtype=np.uint32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (bits | low).view(np.float32)
        x = x[np.isfinite(x)]
        with np.errstate(over="ignore"):
            want = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        assert_equal(oracle.round_bf16(x), want, f"bf16 of ...{low:04x}")


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**4, 2.0**-120, 2.0**100])
def test_oracle_codes_equal_ml_dtypes(scale):
    with np.errstate(over="ignore"):
        x = FINITE * np.float32(scale)
    x = x[np.isfinite(x)]
    for codes, dtype, largest in (
        (oracle.e4m3(x), ml_dtypes.float8_e4m3fn, 448),
        (oracle.e2m1(x), ml_dtypes.float4_e2m1fn, 6),
    ):
        want = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
        assert_equal(codes, want & (15 if largest == 6 else 255), dtype.__name__)


def test_oracle_rounds_ties_to_even_and_keeps_the_sign_of_zero():
    """The ties that the definition lists, written out."""
    ties = {0.25: 0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0, 7.0: 6.0}
    for x, want in ties.items():
        assert oracle.FLOAT4[oracle.e2m1(np.array(x))] == want
        assert oracle.FLOAT4[oracle.e2m1(np.array(-x)) & 7] == want
    assert oracle.e2m1(np.array([-0.0, 0.0, -0.25])).tolist() == [8, 0, 8]
    assert oracle.e4m3(np.array([-0.0, 0.0, np.nan, 1e9])).tolist() == [0x80, 0, 0x7F, 0x7E]


def assert_quantisers_match(values):
    """The jnp quantisers on f32 [n, 128] against the oracle's."""
    codes, scale = jax.jit(reference.quantize_fp8, static_argnums=1)(values, 1e-4)
    want_codes, exponent = oracle.quantise_fp8(values.astype(np.float64), 1e-4)
    assert_equal(codes, want_codes, "fp8 codes")
    assert_equal(scale, np.ldexp(np.float32(1), exponent), "fp8 scale")
    packed, exponents = jax.jit(reference.quantize_mxfp4)(values)
    want_packed, want_exponents = oracle.quantise_mxfp4(values.astype(np.float64))
    assert_equal(exponents, want_exponents, "mxfp4 exponents")
    assert_equal(packed, want_packed, "mxfp4 nibbles")


@pytest.mark.parametrize("mantissa", [0, 1, 63, 64, 65, 95, 96, 97, 127])
@pytest.mark.parametrize("exponent", [-126, -125, -14, 0, 8, 127])
def test_every_value_under_a_maximum(exponent, mantissa):
    """All finite bfloat16, subnormals too, under maxima around the scale boundaries 1.5, 1.75."""
    largest = np.float32((1 + mantissa / 128) * 2.0**exponent)
    assert_quantisers_match(groups_with_maximum(largest, FINITE).astype(np.float32))


def test_every_maximum():
    """Every positive bfloat16 as the largest magnitude of a group; the rest random below it."""
    assert_quantisers_match(groups_of_every_maximum())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_every_value_through_the_query(order, fmt, implementation):
    """Sorted: each head spans half a binade, so every scale occurs. Shuffled: huge maxima."""
    values = NORMAL[np.argsort(np.abs(NORMAL), kind="stable")]
    if order == "shuffled":
        values = np.random.default_rng(1).permutation(NORMAL[np.abs(NORMAL) < 1e20])
    values = values[: len(values) // 8192 * 8192]  # whole blocks of 64 heads
    for block in values.reshape(-1, 64 * 128):
        front = exact_calls.query(jnp.asarray(block.astype(BF16)), fmt, implementation)
        heads = block.reshape(1, 64, 128).astype(np.float64)
        if fmt == "mxfp4":
            codes, exponents = oracle.quantise_mxfp4(heads)
            assert_equal(as_bytes(front.query_scale[..., None]), exponents, "scale")
        else:
            codes, exponent = oracle.quantise_fp8(heads, 1e-10)
            assert_equal(front.weights, np.ldexp(np.float32(1), exponent), "folded scale")
        assert_equal(as_bytes(front.query), codes, "query")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_every_value_through_the_key(fmt, implementation):
    count = len(NORMAL) // 128
    order = np.argsort(np.abs(NORMAL), kind="stable")[: count * 128]
    keys = NORMAL[order].reshape(count, 128)
    cache = jax.jit(lambda keys: exact_calls.insert_keys(keys, fmt, implementation))(keys)
    zero = np.zeros(128)
    values, scales = oracle.key_bytes(zero[None], -zero, keys.astype(np.float64), 1e-6, fmt)
    got_values, got_scales = oracle.split_page(np.asarray(cache))
    assert_equal(got_scales[:, 0], scales, "scales")
    assert_equal(got_values[:, 0], values, "values")
