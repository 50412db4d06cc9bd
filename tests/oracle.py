"""The operator once more, in float64 NumPy, written from the normative numerics alone.

Shares no code with the package: the narrow formats are value tables that are searched for the
nearest entry (ties to the even code), powers of two come from `frexp`, and sums run in float64.
Only where the definition itself names fp32 (the folding of the head weights) does it use fp32.
"""

import dataclasses

import numpy as np

_CODES = np.arange(127)  # e4m3fn: 4 exponent bits, 3 mantissa bits; 127 is NaN
FLOAT8 = np.where(_CODES < 8, _CODES * 2.0**-9, (8 + _CODES % 8) * 2.0 ** (_CODES // 8 - 10))
FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitude of e2m1 codes 0..7
FLOAT8_NAN = 0x7F
ROW_BYTES = {"fp8": 128, "mxfp8": 128, "mxfp4": 64}  # value bytes of one key; 4 scale bytes follow


def round_bf16(x):
    """Float64 values rounded to the nearest bfloat16 (ties to even), still as float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.asarray(x, np.float64)
        exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))[1]
        quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)  # 8 significant bits
        rounded = np.rint(x / quantum) * quantum
        return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, x), rounded)


def nearest_code(x, magnitudes, sign_bit):
    """Code of the nearest table entry; a tie takes the even code, too large takes the last."""
    magnitude = np.abs(x)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    code = np.searchsorted(middles, magnitude, side="left")  # on a tie: the lower neighbour
    tie = magnitude == np.append(middles, np.inf)[code]
    code = code + (tie & (code % 2 == 1))
    return (code + np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def e4m3(x):
    """Nearest e4m3fn code, saturating at 448; every non-finite value takes the NaN code."""
    finite = np.isfinite(x)
    return np.where(finite, nearest_code(np.where(finite, x, 0), FLOAT8, 0x80), FLOAT8_NAN).astype(
        np.uint8
    )


def e2m1(x):
    """Nearest e2m1 code (0..15), saturating at 6; bit 3 is the sign, kept on zero."""
    return nearest_code(x, FLOAT4, 8)


def decode(codes, magnitudes, sign_bit):
    """Float64 value of each code; codes past the table are NaN."""
    table = np.append(magnitudes, np.full(sign_bit - len(magnitudes), np.nan))
    return np.where(codes & sign_bit, -1.0, 1.0) * table[codes & (sign_bit - 1)]


def power_ceil(x):
    """Exponent of the smallest power of two that is >= x, for x > 0."""
    mantissa, exponent = np.frexp(x)
    return exponent - (mantissa == 0.5)


def pack_nibbles(codes):
    """[..., 2n] codes to [..., n] bytes: the even column in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed):
    """Inverse of `pack_nibbles`."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )


def quantise_fp8(values, floor):
    """Last axis (128) to (e4m3 codes, exponent of the scale); any non-finite value spoils all."""
    finite = np.isfinite(values).all(-1, keepdims=True)
    clean = np.where(finite, values, 0.0)
    largest = np.maximum(np.abs(clean).max(-1), np.float64(np.float32(floor)))
    exponent = power_ceil(largest / 448)
    codes = e4m3(clean / np.ldexp(1.0, exponent)[..., None])
    return np.where(finite, codes, FLOAT8_NAN).astype(np.uint8), exponent


def quantise_mxfp4(values):
    """Last axis (128) to (64 packed bytes, 4 exponent bytes); a non-finite group has byte 0xFF."""
    groups = values.reshape(*values.shape[:-1], 4, 32)
    finite = np.isfinite(groups).all(-1)
    clean = np.where(finite[..., None], groups, 0.0)
    largest = np.maximum(np.abs(clean).max(-1), 6 * 2.0**-126)
    exponent = power_ceil(largest / 6)
    codes = e2m1(clean / np.ldexp(1.0, exponent)[..., None]).reshape(values.shape)
    return pack_nibbles(codes), np.where(finite, exponent + 127, 0xFF).astype(np.uint8)


@dataclasses.dataclass
class Expected:
    """What a call must return, and what a comparison needs to judge a last-bit difference."""

    query: np.ndarray  # uint8 [B, H, 128] e4m3 codes, or [B, H, 64] packed e2m1
    query_scale: np.ndarray | None  # uint32 [B, H] for mxfp4
    weights: np.ndarray  # float32 [B, H], holding bfloat16 values where that is asked for
    cache: np.ndarray  # uint8, the operand's shape
    rows: np.ndarray  # int [layers or none, pages, page_size]: how many rows wrote each token
    lowest: np.ndarray  # int [B, H, 128]: the query's codes by `rank` may honestly lie between
    highest: np.ndarray  # these two, where another summation crosses a rounding boundary
    torn: np.ndarray  # bool, like query: bytes that an activation between two neighbours decides
    query_exponent: np.ndarray  # int [B, H] (fp8) or [B, H, 4]: power of two of the query's scale


def _layer(array, rank, layer):
    if array.ndim == rank:
        return array
    return array[min(max(int(layer), 0), array.shape[0] - 1)]


def front(
    projected,
    q_norm,
    wq_b,
    key_norm_weight,
    key_norm_bias,
    cache,
    slots,
    layer=None,
    *,
    key=None,
    head_weights=None,
    key_offset,
    weight_offset,
    eps,
    key_eps,
    cache_format="fp8",
    weights_dtype="bfloat16",
    num_heads=None,
    head_start=0,
    weight_scale=None,
):
    """`index_front` on NumPy arrays; the same arguments and meanings."""
    q_norm = _layer(q_norm, 1, layer).astype(np.float64)
    wq_b = _layer(wq_b, 2, layer).astype(np.float64)
    heads, width = wq_b.shape[0] // 128, wq_b.shape[1]
    batch = projected.shape[0]

    x = projected[:, :width].astype(np.float64)
    rr = 1 / np.sqrt((x * x).sum(-1, keepdims=True) / width + np.float64(np.float32(eps)))
    with np.errstate(invalid="ignore"):
        exact = x * rr * q_norm
        y = round_bf16(exact)
        projection = (y @ wq_b.T).reshape(batch, heads, 128)
        # How far another honest evaluation may be: its fp32 sums, and activations so close to a
        # rounding boundary of bfloat16 that fp32 may take the neighbour.
        flips = np.abs(round_bf16(exact * (1 + 2.0**-20)) - round_bf16(exact * (1 - 2.0**-20)))
        flips, sums = (
            (each @ np.abs(wq_b).T).reshape(projection.shape)
            for each in (flips, np.abs(y) * 2.0**-20)
        )
    query = round_bf16(projection)

    source = projected if head_weights is None else head_weights
    first = weight_offset + int(head_start)
    folded = source[:, first : first + heads].astype(np.float32)
    query_scale = None
    if cache_format == "mxfp4":
        query_bytes, groups = quantise_mxfp4(query)
        query_scale = groups.view("<u4")[..., 0] if groups.size else np.zeros((batch, heads), "<u4")
        query_exponent = groups.astype(np.int64) - 127
    else:
        query_bytes, query_exponent = quantise_fp8(query, 1e-10)
        folded = folded * np.exp2(query_exponent).astype(np.float32)
        folded = np.where(np.isfinite(query).all(-1), folded, np.float32(np.nan))
    lowest, highest = code_range(projection, flips + sums, query_exponent, cache_format)
    low, high = code_range(projection, flips, query_exponent, cache_format)
    torn = (low != high).reshape(*query_bytes.shape, 128 // query_bytes.shape[-1]).any(-1)
    if weight_scale is None:
        weight_scale = ((heads if num_heads is None else num_heads) * 128) ** -0.5
    weights = folded * np.float32(weight_scale)
    if np.dtype(weights_dtype).name == "bfloat16":
        weights = round_bf16(weights).astype(np.float32)

    source = projected if key is None else key
    codes, scales = key_bytes(
        source[:, key_offset : key_offset + 128].astype(np.float64),
        _layer(key_norm_weight, 1, layer).astype(np.float64),
        _layer(key_norm_bias, 1, layer).astype(np.float64),
        key_eps,
        cache_format,
    )
    cache, rows = insert(cache, slots, layer, codes, scales)
    return Expected(
        query_bytes, query_scale, weights, cache, rows, lowest, highest, torn, query_exponent
    )


def rank(codes, cache_format):
    """Codes as integers in the order of their values (both zeros are 0); nibbles unpacked."""
    sign = 8 if cache_format == "mxfp4" else 128
    codes = unpack_nibbles(codes) if cache_format == "mxfp4" else codes
    magnitude = (codes & (sign - 1)).astype(np.int16)
    return np.where(codes & sign, -magnitude, magnitude)


def code_range(projection, slack, exponent, cache_format):
    """Ranks of the lowest and highest code that a projection within the slack may round to."""
    four_bit = cache_format == "mxfp4"
    exponent = np.repeat(exponent, 32, -1) if four_bit else exponent[..., None]
    known = np.isfinite(projection) & np.isfinite(slack)
    projection, slack = (np.where(known, x, 0) for x in (projection, slack))
    for end in (projection - slack, projection + slack):
        value = round_bf16(end) / np.ldexp(1.0, exponent)
        yield rank(pack_nibbles(e2m1(value)) if four_bit else e4m3(value), cache_format)


def key_bytes(key, weight, bias, key_eps, cache_format):
    """LayerNorm, bfloat16, quantisation: (value bytes [B, 128 or 64], scale bytes [B, 4])."""
    with np.errstate(invalid="ignore"):
        centred = key - key.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        rr = 1 / np.sqrt(variance + np.float64(np.float32(key_eps)))
        values = round_bf16(centred * rr * weight + bias)
    if cache_format == "mxfp4":
        return quantise_mxfp4(values)
    codes, exponent = quantise_fp8(values, 1e-4)
    if cache_format == "mxfp8":
        return codes, np.repeat((exponent + 127).astype(np.uint8)[:, None], 4, 1)
    return codes, np.exp2(exponent).astype("<f4")[:, None].view(np.uint8)


def split_page(cache):
    """Views of the value bytes [..., pages, page_size, 128 or 64] and scale bytes [..., 4]."""
    *lead, page_size, width = cache.shape
    flat = cache.reshape(*lead, page_size * width)
    values, scales = np.split(flat, [page_size * (width - 4)], axis=-1)
    return values.reshape(*lead, page_size, width - 4), scales.reshape(*lead, page_size, 4)


def insert(cache, slots, layer, codes, scales):
    """A copy of `cache` with the keys put in, and how many rows wrote each token."""
    cache = np.array(cache)
    rows = np.zeros(cache.shape[:-1], np.int64)
    if cache.ndim == 4 and not 0 <= int(layer) < cache.shape[0]:
        return cache, rows
    pages, page_size, _ = cache.shape[-3:]
    pool, count = (cache, rows) if cache.ndim == 3 else (cache[int(layer)], rows[int(layer)])
    pool_values, pool_scales = split_page(pool)
    for row, slot in enumerate(int(s) for s in slots):
        if 0 <= slot < pages * page_size:
            at = divmod(slot, page_size)
            pool_values[at], pool_scales[at] = codes[row], scales[row]
            count[at] += 1
    return cache, rows


def keys(cache, slots, cache_format, layer=None):
    """Dequantised keys, float64 [..., 128], read straight from the page layout."""
    pool = cache if cache.ndim == 3 else cache[int(layer)]
    at = np.divmod(np.asarray(slots), pool.shape[1])
    values, scales = split_page(pool)
    return dequantise(values[at], scales[at], cache_format)


def dequantise(values, scales, cache_format):
    """Value bytes [..., 128 or 64] and scale bytes [..., 4] to float64 [..., 128]."""
    if cache_format == "fp8":
        scale = np.ascontiguousarray(scales).view("<f4").astype(np.float64)
    else:
        scale = np.where(scales == 0xFF, np.nan, np.exp2(scales.astype(np.float64) - 127))
        scale = np.repeat(scale, 32, -1)
    if cache_format == "mxfp4":
        return decode(unpack_nibbles(values), FLOAT4, 8) * scale
    return decode(values, FLOAT8, 128) * scale


def score_magnitudes(query, query_scale, weights, cache, table, lens, cache_format, layer=None):
    """What the errors of `scores` are measured by: key_scale * sum_h |w_h| * sum_d |q k|."""
    return scores(query, query_scale, weights, cache, table, lens, cache_format, layer, np.abs)


def scores(
    query, query_scale, weights, cache, block_table, context_lens, cache_format, layer=None, of=None
):
    """`index_scores` in float64: [B, max_len], -inf past each row's length."""
    page_size = cache.shape[-2]
    if cache_format == "mxfp4":
        scale_bytes = np.ascontiguousarray(query_scale).view(np.uint8)
        scale_bytes = scale_bytes.reshape(*query_scale.shape, 4)
        rows = dequantise(query, scale_bytes, cache_format)
    else:
        rows = decode(query, FLOAT8, 128)
    of = of or (lambda x: x)
    length = block_table.shape[1] * page_size
    out = np.full((len(query), length), -np.inf)
    for row, count in enumerate(context_lens):
        slots = (block_table[row][:, None] * page_size + np.arange(page_size)).reshape(-1)[:count]
        dots = of(rows[row]) @ of(keys(cache, slots, cache_format, layer)).T
        out[row, :count] = of(weights[row].astype(np.float64)) @ np.maximum(dots, 0)
    return out
