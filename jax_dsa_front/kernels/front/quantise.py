"""Scales and codes of the formats, and the amplitudes they follow from.

The numbers are those of _front/reference.py. Amplitudes are compared as integers (for non-negative
floats the same order, with infinities and NaN on top), so that one comparison also finds the
non-finite ones."""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from .. import arithmetic
from ..arithmetic import multiply

FP8_QUERY_FLOOR = 0x2EDBE6FF  # 1e-10
FP8_KEY_FLOOR = 0x38D1B717  # 1e-4
FP4_FLOOR = 0x01C00000  # 6 * 2**-126
INFINITY = 0x7F800000
NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF


def magnitude(value):
    return arithmetic.bits(value) & Uint32(MAGNITUDE)


def largest(values):
    """The largest magnitude, as bits."""
    top = magnitude(values[0])
    for value in values[1:]:
        top = arithmetic.max_u32(top, magnitude(value))
    return top


@cute.jit
def fp8_scale(amax):
    """(bits of pow2_ceil(amax / 448), its reciprocal); both NaN where amax (bits) is not finite.

    448 = 1.75 * 2**8, so the division is a subtraction of exponents and the ceiling an addition to
    the mantissa: equal to the fp32 division for every bf16 amax."""
    scale = ((amax + Uint32(0x1FFFFF)) & Uint32(INFINITY)) - Uint32(8 << 23)
    inverse = Uint32(254 << 23) - scale
    if amax >= Uint32(INFINITY):
        scale = Uint32(NAN)
        inverse = Uint32(NAN)
    return scale, arithmetic.float_of(inverse)


@cute.jit
def fp4_scale(amax):
    """(exponent byte of pow2_ceil(amax / 6), reciprocal of the scale); byte 0xff where amax (bits)
    is not finite."""
    # 6 = 1.5 * 2**2
    exponent = ((arithmetic.max_u32(amax, Uint32(FP4_FLOOR)) + Uint32(0x3FFFFF)) >> 23) - Uint32(2)
    inverse = (Uint32(254) - exponent) << 23
    if amax >= Uint32(INFINITY):
        exponent = Uint32(0xFF)
    return exponent, arithmetic.float_of(inverse)


def fp4_codes(values, inverse, converts):
    """e2m1 of values * inverse (at most 6 in magnitude), nearest even, the sign kept on zero: up to
    four codes in one word, the first in the low nibble.

    `converts`: whether the architecture has an instruction for it, which Hopper has not."""
    if converts:
        zeros = [Float32(0)] * (4 - len(values))
        return arithmetic.e2m1_word([multiply(value, inverse) for value in values] + zeros)
    inverse = multiply(inverse, Float32(2.0**-14))
    scaled = [multiply(value, inverse) for value in values] + [Float32(0)] * (len(values) % 2)
    word = fp4_code_pair(*scaled[:2])
    for i in range(2, len(scaled), 2):
        word = word | (fp4_code_pair(*scaled[i : i + 2]) << (4 * i))
    return word


def fp4_code_pair(low, high):
    """Two codes of `fp4_codes`, of values that are scaled by 2**-14 once more.

    So scaled, e2m1 values are fp16 numbers whose exponent and top mantissa bit are the code;
    subnormal ones included. Rounding to that bit is an addition, and both halves of a word take it
    together. Of bfloat16 values, fp16 keeps all bits that matter: those down to 2**-10 of a code's
    unit."""
    halves = arithmetic.f16_pair(low, high)
    rounded = (halves + Uint32(0x00FF00FF) + ((halves >> 9) & Uint32(0x00010001))) >> 9
    codes = (rounded & Uint32(0x00070007)) | ((rounded >> 3) & Uint32(0x00080008))
    return (codes | (codes >> 12)) & Uint32(0xFF)


def fp8_word(values, inverse):
    """Four e4m3fn codes, the first in the low byte."""
    scaled = [multiply(value, inverse) for value in values]
    return arithmetic.e4m3_pair(scaled[0], scaled[1]) | (
        arithmetic.e4m3_pair(scaled[2], scaled[3]) << 16
    )
