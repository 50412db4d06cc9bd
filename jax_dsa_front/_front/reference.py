"""`index_front` in plain `jax.numpy`: specification, portable implementation and test oracle.

Axes: B rows (tokens), P packed columns, K query latent, H heads, L layers, 128 head width.

Everything is fp32 except where a bfloat16 or FP8 rounding is written out. Those roundings are
pinned: XLA is free to drop a narrowing that is widened again, and on GPUs it does. Hence
`lax.reduce_precision` for bfloat16 and a barrier behind the FP8 cast. XLA's GPU code divides
inexactly, so no scale depends on a quotient: `amax / 448` and `amax * (1 / 448)` have the same
`pow2_ceil` for every bfloat16 amax (and so for 6), and a power of two is inverted by its bits.

Subnormal numbers: the floors below the maxima keep every scale and every quotient of FP8 normal,
and the MXFP4 codes are taken from integers where an element is subnormal, so the quantisers are
exact even where a backend flushes subnormals to zero (XLA on CPU does). Products and sums in front
of them (RMSNorm, projection, LayerNorm) are flushed there: results below 2**-126 become zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dsa_front import _cache
from jax_dsa_front._cache import HEAD_DIM
from jax_dsa_front._front.config import STACKABLE, FrontConfig

E4M3_MAX = 448.0
E2M1_MAX = 6.0
QUERY_FLOOR = 1e-10
KEY_FLOOR = 1e-4
E4M3_NAN = 0x7F
EXPONENT_NAN = 0xFF


class Fp8(NamedTuple):
    """`codes` uint8 [..., 128] (e4m3fn bits), `scale` f32 [...]; NaN if a value is not finite."""

    codes: jax.Array
    scale: jax.Array


class Mxfp4(NamedTuple):
    """`codes` uint8 [..., 64] (two e2m1 each), `exponents` uint8 [..., 4] (UE8M0)."""

    codes: jax.Array
    exponents: jax.Array


def round_bf16(x: jax.Array) -> jax.Array:
    """f32 rounded to the nearest bfloat16, ties to even, still f32."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def widen(x: jax.Array) -> jax.Array:
    """f32 of a bfloat16 (or float32) array.

    Pinned to what bfloat16 can hold: where the caller rounds to bfloat16 in the same program, XLA
    on GPUs would take the number from before that rounding.
    """
    return round_bf16(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else x


def pow2_ceil(x: jax.Array) -> jax.Array:
    """The smallest power of two >= x, for positive normal f32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x7FFFFF)
    return lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)


def pow2_inverse(scale: jax.Array) -> jax.Array:
    """1 / scale, for an f32 power of two in 2**-126 .. 2**126."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    return lax.bitcast_convert_type(jnp.uint32(254 << 23) - bits, jnp.float32)


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float) -> jax.Array:
    """f32 [B, K] `bf16((x * rsqrt(sum(x*x)/K + eps)) * gamma)` of bf16 [B, K] and [K]."""
    x = widen(x)
    mean_square = jnp.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
    return round_bf16((x * lax.rsqrt(mean_square + jnp.float32(eps))) * _as_row(gamma))


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """f32 [B, 128], bf16-rounded: two-pass LayerNorm of bf16 [B, 128] with f32 [128] affine."""
    x = widen(x)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    scaled = centred * lax.rsqrt(variance + jnp.float32(eps)) * _as_row(weight)
    return round_bf16(scaled + _as_row(bias))


def quantize_fp8(values: jax.Array, floor: float) -> Fp8:
    """FP8 with one power-of-two scale per last axis: `e4m3fn(v / pow2_ceil(max(amax, floor)/448))`.

    `values` are f32 holding bfloat16 numbers. A group with a NaN or Inf gets NaN codes and scale;
    it is zeroed first, so that no NaN takes part in arithmetic.
    """
    finite = jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
    values = jnp.where(finite, values, 0.0)
    amax = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    scale = pow2_ceil(jnp.maximum(amax, jnp.float32(floor)) * jnp.float32(1 / E4M3_MAX))
    # JAX casts overflow to NaN, hardware saturates. The barrier keeps the narrowing on GPUs.
    clipped = jnp.clip(values * pow2_inverse(scale), -E4M3_MAX, E4M3_MAX)
    codes = lax.optimization_barrier(clipped.astype(jnp.float8_e4m3fn))
    codes = lax.bitcast_convert_type(codes, jnp.uint8)
    codes = jnp.where(finite, codes, jnp.uint8(E4M3_NAN))
    return Fp8(codes, jnp.where(finite, scale, jnp.nan)[..., 0])


def quantize_mxfp4(values: jax.Array) -> Mxfp4:
    """MXFP4: e2m1 codes with one UE8M0 exponent per 32 columns of f32 [..., 128].

    `e = exponent(pow2_ceil(max(amax, 6*2**-126) / 6))`, `code = e2m1(v / 2**(e - 127))` to nearest
    even, the sign kept on zero. Byte j holds column 2j in its low and 2j+1 in its high nibble.
    A group with a NaN or Inf gets the exponent 0xFF.
    """
    groups = values.reshape(*values.shape[:-1], HEAD_DIM // 32, 32)
    finite = jnp.all(jnp.isfinite(groups), axis=-1, keepdims=True)
    groups = jnp.where(finite, groups, 0.0)
    amax = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    floor = jnp.float32(E2M1_MAX * 2.0**-126)
    scale = pow2_ceil(jnp.maximum(amax, floor) * jnp.float32(1 / E2M1_MAX))
    exponent = lax.bitcast_convert_type(scale, jnp.uint32) >> 23
    codes = _e2m1(groups, exponent).reshape(*values.shape[:-1], HEAD_DIM // 2, 2)
    packed = codes[..., 0] | (codes[..., 1] << 4)
    exponent = jnp.where(finite, exponent.astype(jnp.uint8), jnp.uint8(EXPONENT_NAN))
    return Mxfp4(packed, exponent[..., 0])


def _e2m1(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """uint8 e2m1 codes (0 .5 1 1.5 2 3 4 6, sign in bit 3) of f32 `values / 2**(exponent - 127)`.

    `exponent` is uint32 in 1..253, so that `2**(127 - exponent)` is normal.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    inverse = pow2_inverse(lax.bitcast_convert_type(exponent << 23, jnp.float32))
    # A subnormal is its bits times 2**-149. Taken as an integer it survives flushing to zero; the
    # product of both powers of two is built from bits as well (0 where it is too small to count).
    tiny_inverse = jnp.maximum(105 - exponent.astype(jnp.int32), 0) << 23
    subnormal = magnitude.astype(jnp.float32) * lax.bitcast_convert_type(tiny_inverse, jnp.float32)
    scaled = lax.bitcast_convert_type(magnitude, jnp.float32) * inverse
    scaled = jnp.where(magnitude < jnp.uint32(0x00800000), subnormal, scaled)
    # One comparison per rounding boundary; a tie goes to the even code.
    code = (bits >> 31) << 3
    for boundary, tie_rounds_up in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        above = scaled >= boundary if tie_rounds_up else scaled > boundary
        code = code + above.astype(jnp.uint32)
    return code.astype(jnp.uint8)


def reference_front(
    config: FrontConfig, *operands: jax.Array, on_cuda: bool = False
) -> tuple[jax.Array, ...]:
    """`index_front` on operands that have been checked.

    Operands: projected, q_norm, wq_b, key_norm_weight, key_norm_bias, cache, slots, key,
    head_weights, then the int32 scalars layer and head_start where the config says so.
    Returns query, weights, cache and, for mxfp4, query_scale.

    `on_cuda`: XLA needs no help with layers there, see `_isolated_slice_of`.
    """
    projected, q_norm, wq_b, key_norm_weight, key_norm_bias = operands[:5]
    cache, slots, key, head_weights, *scalars = operands[5:]
    layer = scalars.pop(0) if config.has_layer_operand else config.layer or 0
    head_start = scalars.pop(0) if config.has_head_start_operand else config.head_start or 0
    stacked = zip(operands[1:6], STACKABLE.values(), strict=True)
    layers = max(x.shape[0] if x.ndim > rank else 1 for x, rank in stacked)
    own_layer = _cache.clamp(layer, layers)

    def of_layer(operand: jax.Array, rank: int) -> jax.Array:
        return operand if operand.ndim == rank else _slice_of(operand, own_layer)

    gamma, matrix = of_layer(q_norm, 1), wq_b
    if wq_b.ndim == 3:
        matrix = (_slice_of if on_cuda else _isolated_slice_of)(wq_b, own_layer)
    heads, latent = matrix.shape[0] // HEAD_DIM, matrix.shape[1]

    normed = rms_norm(projected[:, :latent], gamma, config.eps).astype(jnp.bfloat16)
    contract_latent = (((1,), (1,)), ((), ()))
    values = lax.dot_general(
        normed,
        matrix,
        contract_latent,
        precision=lax.Precision.DEFAULT,  # else jax_default_matmul_precision changes the sums
        preferred_element_type=jnp.float32,
    )
    values = round_bf16(values).reshape(values.shape[0], heads, HEAD_DIM)

    first = config.weight_offset + _cache.clamp(head_start, config.num_heads - heads + 1)
    own_weights = widen(lax.dynamic_slice_in_dim(head_weights, first, heads, axis=1))

    own_key = lax.slice_in_dim(key, config.key_offset, config.key_offset + HEAD_DIM, axis=1)
    normed_key = layer_norm(
        own_key, of_layer(key_norm_weight, 1), of_layer(key_norm_bias, 1), config.key_eps
    )

    if config.cache_format == "mxfp4":
        query4, key4 = quantize_mxfp4(values), quantize_mxfp4(normed_key)
        query, folded = query4.codes, own_weights
        query_scale = (_cache.join_bytes(query4.exponents),)
        cached = jnp.concatenate([key4.codes, key4.exponents], axis=-1)
    else:
        query8, key8 = quantize_fp8(values, QUERY_FLOOR), quantize_fp8(normed_key, KEY_FLOOR)
        query = lax.bitcast_convert_type(query8.codes, jnp.float8_e4m3fn)
        folded, query_scale = own_weights * query8.scale, ()
        scale = _cache.encode_scale(key8.scale, config.cache_format)
        cached = jnp.concatenate([key8.codes, scale], axis=-1)

    weights = (folded * jnp.float32(config.weight_scale)).astype(config.weights_dtype)
    if config.has_layer_operand:  # a layer that does not exist inserts nothing
        slots = jnp.where((layer >= 0) & (layer < layers), slots, -1)
    cache = _cache.insert_rows(cache, cached, slots, own_layer)
    return query, weights, cache, *query_scale


def _slice_of(stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    if isinstance(layer, int):
        return lax.index_in_dim(stack, layer, keepdims=False)
    return lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _isolated_slice_of(stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    """The same for bfloat16 weights on CPU, where XLA may widen the stack in front of the slicing.

    It slices no bfloat16 (jaxlib 0.10): hence uint16. And it hoists what does not depend on the
    loop over layers out of that loop, for all layers at once: hence the barrier.
    """
    stack, layer = lax.optimization_barrier((stack, layer))
    bits = _slice_of(lax.bitcast_convert_type(stack, jnp.uint16), layer)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _as_row(vector: jax.Array) -> jax.Array:
    return widen(vector)[None, :]
