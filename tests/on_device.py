"""Comparing two results of `index_front` on the device: counters of what differs and how.

Bytes are compared as integers, because XLA may skip a rounding of floats that it sees widened
again. Two honest sums may lie on the two sides of a power of two times 448 (or 6). Their scales
then differ by a factor of two, and the largest code tells: 448 under the small scale, 224 under
the large one. Such heads, keys and groups are counted as flipped; any other difference is wrong.
"""

import jax.numpy as jnp
from jax import lax

MUST_BE_ZERO = (
    "weights_wrong",  # unequal, and not by the factor of a flipped head
    "scales_wrong",  # of queries (mxfp4) and keys, in the same sense
    "nan_misplaced",
    "query_wild",  # codes further apart than any order of summation explains
    "key_wild",  # more than one code apart
    "untouched_changed",  # by the kernel, bytes of the cache that no valid slot names
    "untouched_changed_by_jnp",
    "rerun_differs",
    "guards_changed",
)
COUNTED = ("heads", "heads_flipped", "query_codes", "query_codes_off")
COUNTED += ("keys", "keys_flipped", "key_codes", "key_codes_off")
FP8_NAN, FP4_NAN = 0x7F, 0xFF
LARGEST = {"fp8": 0x7E, "mxfp8": 0x7E, "mxfp4": 7}  # 448 and 6
HALF = {"fp8": 0x76, "mxfp8": 0x76, "mxfp4": 5}  # 224 and 3


def count(condition):
    return jnp.sum(condition, dtype=jnp.int64)


def as_integers(array):
    """The bits of floats (weights, query), integers as they are."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return lax.bitcast_convert_type(array, width)


def as_float(bits):
    """f32 of the bits of bfloat16 or float32."""
    wide = bits.astype(jnp.uint32)
    return lax.bitcast_convert_type(wide << 16 if bits.dtype == jnp.uint16 else wide, jnp.float32)


def split_page(cache):
    """Value bytes [..., pages, page_size, 128 or 64] and scale bytes [..., 4] of a cache."""
    *lead, page_size, width = cache.shape
    flat = cache.reshape(*lead, page_size * width)
    values = flat[..., : page_size * (width - 4)].reshape(*lead, page_size, width - 4)
    return values, flat[..., page_size * (width - 4) :].reshape(*lead, page_size, 4)


def grouped_codes(values, fmt):
    """Codes [..., G, 128 / G] with one scale per group: G = 4 for mxfp4, else 1."""
    if fmt != "mxfp4":
        return values[..., None, :]
    codes = jnp.stack([values & jnp.uint8(15), values >> 4], axis=-1)
    return codes.reshape(*values.shape[:-1], 4, 32)


def rank(codes, fmt):
    """Codes as integers in the order of their values."""
    sign = jnp.uint8(8 if fmt == "mxfp4" else 128)
    magnitude = (codes & (sign - jnp.uint8(1))).astype(jnp.int32)
    return jnp.where((codes & sign) != 0, -magnitude, magnitude)


def scale_exponents(scales, fmt):
    """int32 [..., G] of scale bytes [..., 4]: of fp32, four times the same byte, or four bytes."""
    wide = scales.astype(jnp.int32)
    if fmt == "fp8":
        return ((wide[..., 3:] & 0x7F) << 1) | (wide[..., 2:3] >> 7)
    return wide[..., :1] if fmt == "mxfp8" else wide


def compare_groups(left, right, exponents, considered, fmt):
    """Counters of two arrays of codes [..., G, n], and which groups are flipped, and which NaN.

    `exponents`: a pair of int32 [..., G]; None where the largest codes have to tell.
    """
    ranks = rank(left, fmt), rank(right, fmt)
    tops = [jnp.max(jnp.abs(r), axis=-1) for r in ranks]
    up = (tops[0] == HALF[fmt]) & (tops[1] == LARGEST[fmt])  # the left scale is the larger one
    down = (tops[1] == HALF[fmt]) & (tops[0] == LARGEST[fmt])
    if fmt == "mxfp4":
        spoilt = [e == FP4_NAN for e in exponents]
        misplaced = spoilt[0] != spoilt[1]
    else:
        nans = [(codes & jnp.uint8(0x7F)) == FP8_NAN for codes in (left, right)]
        spoilt = [jnp.all(nan, axis=-1) for nan in nans]
        misplaced = (jnp.any(nans[0], -1) != spoilt[0]) | (jnp.any(nans[1], -1) != spoilt[1])
        misplaced |= spoilt[0] != spoilt[1]
    judged = considered & ~spoilt[0] & ~spoilt[1]
    if exponents is None:
        difference = up.astype(jnp.int32) - down.astype(jnp.int32)
    else:
        difference = exponents[0] - exponents[1]
    flipped = ((difference == 1) & up) | ((difference == -1) & down)
    same = judged & (difference == 0)
    steps = jnp.where(same[..., None], jnp.abs(ranks[0] - ranks[1]), 0)
    counters = {
        "nan_misplaced": count(misplaced & considered),
        "scales_wrong": count(judged & (difference != 0) & ~flipped),
        "flipped": count(judged & flipped),
        "groups": count(judged),
        "codes": count(same) * left.shape[-1],
        "off": count((left != right) & same[..., None]),
    }
    return counters, steps, jnp.where(judged & flipped, difference, 0)


def compare_queries(kernel, plain, specified, fmt):
    """Queries and weights of rows whose values are `specified` (bool [B])."""
    rows = specified[:, None, None]
    codes = [grouped_codes(as_integers(front.query), fmt) for front in (kernel, plain)]
    exponents = None
    if fmt == "mxfp4":
        scales = [front.query_scale for front in (kernel, plain)]
        exponents = [
            jnp.stack([(s >> shift).astype(jnp.int32) & 0xFF for shift in (0, 8, 16, 24)], -1)
            for s in scales
        ]
    found, steps, difference = compare_groups(*codes, exponents, rows, fmt)
    wild = steps > 1
    if fmt != "mxfp4":  # near zero codes lie close; what counts is the distance on the scale
        values = [lax.bitcast_convert_type(c, jnp.float8_e4m3fn).astype(jnp.float32) for c in codes]
        wild &= jnp.abs(values[0] - values[1]) > 448 / 128
    weights = [as_float(as_integers(front.weights)) for front in (kernel, plain)]
    factor = 1.0
    if fmt != "mxfp4":
        factor = jnp.exp2(difference[..., 0].astype(jnp.float32))
    equal = (weights[0] == weights[1] * factor) | (jnp.isnan(weights[0]) & jnp.isnan(weights[1]))
    return {
        "weights_wrong": count(~equal & specified[:, None]),
        "scales_wrong": found["scales_wrong"],
        "nan_misplaced": found["nan_misplaced"],
        "query_wild": count(wild),
        "heads": found["groups"],
        "heads_flipped": found["flipped"],
        "query_codes": found["codes"],
        "query_codes_off": found["off"],
    }


def compare_caches(kernel, plain, before, rows, fmt):
    """Whole caches; `rows`: how many valid slots name each token."""
    (values, scales), (values2, scales2) = split_page(kernel), split_page(plain)
    once = (rows == 1)[..., None]
    exponents = scale_exponents(scales, fmt), scale_exponents(scales2, fmt)
    codes = grouped_codes(values, fmt), grouped_codes(values2, fmt)
    found, steps, difference = compare_groups(*codes, exponents, once, fmt)
    # What the exponents do not see: the mantissa of fp32, the copies of the byte
    unlike = jnp.any(scales != scales2, axis=-1, keepdims=True)
    unlike &= jnp.all(difference == 0, axis=-1, keepdims=True) & once
    if fmt != "mxfp4":
        unlike &= (values[..., :1] & jnp.uint8(0x7F)) != FP8_NAN  # such a scale says nothing
    changed = []
    for cache in (kernel, plain):
        pairs = zip(split_page(cache), split_page(before), strict=True)
        changed.append(sum(count((a != b) & (rows == 0)[..., None]) for a, b in pairs))
    return {
        "scales_wrong": found["scales_wrong"] + count(unlike),
        "nan_misplaced": found["nan_misplaced"],
        "key_wild": count(steps > 1),
        "keys": count(once),
        "keys_flipped": found["flipped"],
        "key_codes": found["codes"],
        "key_codes_off": found["off"],
        "untouched_changed": changed[0],
        "untouched_changed_by_jnp": changed[1],
    }


def compare_rerun(first, second, rows):
    """Everything the same, but for tokens that rows share."""
    differs = jnp.int64(0)
    for name in ("query", "query_scale", "weights"):
        pair = getattr(first, name), getattr(second, name)
        if pair[0] is not None:
            differs += count(as_integers(pair[0]) != as_integers(pair[1]))
    for a, b in zip(split_page(first.cache), split_page(second.cache), strict=True):
        differs += count((a != b) & (rows <= 1)[..., None])
    return {"rerun_differs": differs}
