"""The paged key cache (its one description) and the portable scorer that reads it.

A cache is uint8 `[pages, page_size, R]`, or `[L, pages, page_size, R]` for L layers, with R = 132
(fp8, mxfp8) or 68 (mxfp4) bytes per token. `[p, t]` is *not* token t of page p. A page is one run
of `page_size * R` bytes: first the packed values of all its tokens, R - 4 bytes each, then their
scales, four bytes each: an fp32 (fp8), four copies of a UE8M0 exponent (mxfp8), or one UE8M0
exponent per 32 columns (mxfp4). Slot s is token `s % page_size` of page `s // page_size`. This is
the layout that DeepGEMM's paged MQA-logits kernels read.

Every piece of a token starts at a multiple of four bytes, and so does every row of the array:
a token is R / 4 words that never straddle two rows. Words are addressed by (layer,) page, row and
column in the caller's shape, because reshaping or bitcasting a cache copies it on CPU and a flat
index overflows 32 bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_dsa_front import _checks, _rules
from jax_dsa_front._config import HEAD_DIM, ROW_BYTES

WORD = 4


def empty_cache(
    pages: int, page_size: int = 64, *, cache_format: str, layers: int | None = None
) -> jax.Array:
    """A cache of zeros: uint8 `[pages, page_size, R]`, with a leading axis if `layers` is given.

    R is 132 bytes per token for "fp8" and "mxfp8", 68 for "mxfp4". Zero bytes decode to zero keys.
    Raises TypeError or ValueError if the format is unknown or a size is not an int in its range:
    `pages` below 2**31 - 1, `page_size` up to 2**25, all from 1.
    """
    shape = [
        _rules.integer("pages", pages, 1, _checks.MAX_PAGES),
        _rules.integer("page_size", page_size, 1, _checks.MAX_PAGE_SIZE),
    ]
    if layers is not None:
        shape.insert(0, _rules.integer("layers", layers, 1))
    return jnp.zeros([*shape, ROW_BYTES[_checks.cache_format(cache_format)]], jnp.uint8)


def read_keys(
    cache: jax.Array,
    slots: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    cache_format: str,
) -> jax.Array:
    """The cached keys of `slots`, dequantised: f32 `[..., 128]` for integer slots `[...]`.

    `cache` is uint8 `[pages, page_size, R]`, or `[L, pages, page_size, R]` with `layer`, an int or
    an integer scalar (a traced one is clamped to [0, L-1]). `slots` is int32 or int64, any shape.
    A slot outside [0, pages*page_size) gives a row of NaN. fp8 and mxfp8 caches look alike:
    `cache_format` ("fp8", "mxfp8", "mxfp4") must be the one that the keys were written with.

    Raises TypeError or ValueError for arguments of a wrong type, shape or range.
    """
    slots, layer = _checks.reader_arguments(cache, slots, layer, cache_format)
    return _read_keys(cache, slots, layer, cache_format)


def index_scores(
    query: jax.Array,
    query_scale: jax.Array | None,
    weights: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    cache_format: str = "fp8",
) -> jax.Array:
    """Scores of the cached keys for every row: f32 `[B, max_len]`, -inf past each length.

        fp8, mxfp8:  score[b, n] = key_scale[n] * sum_h relu(query[b, h] . key[n]) * weights[b, h]
        mxfp4:       score[b, n] = sum_h relu(query[b, h] . key[n]) * weights[b, h]

    with B rows, H heads and `max_len = N * page_size`; for mxfp4 both scales are inside the dot.

    query         float8_e4m3fn [B, H, 128], for mxfp4 uint8 [B, H, 64]
    query_scale   uint32 [B, H] for mxfp4, else None
    weights       bfloat16 or float32 [B, H]
    cache         uint8 [pages, page_size, R], or [L, pages, page_size, R] with `layer`
    block_table   int32 or int64 [B, N]: the page that holds tokens n*page_size onwards of the row
    context_lens  int32 or int64 [B]: valid tokens of the row, the newest included
    layer         int or integer scalar, needed for a stacked cache; a traced one is clamped

    This is what DeepGEMM's paged MQA-logits kernels compute, in plain JAX for any backend: exact
    products, fp32 sums. Positions whose block table entry is no page score -inf. Only the pages of
    the block table are gathered (R bytes per position), and widened row by row.

    Raises TypeError or ValueError for arguments of a wrong type, shape or range.
    """
    arrays = {
        "query": query,
        "weights": weights,
        "cache": cache,
        "block_table": block_table,
        "context_lens": context_lens,
    }
    block_table, layer = _checks.scorer_arguments(arrays, query_scale, layer, cache_format)
    return _index_scores(
        query, query_scale, weights, cache, block_table, context_lens, layer, cache_format
    )


def insert_rows(
    cache: jax.Array, rows: jax.Array, slots: jax.Array, layer: jax.Array | int
) -> jax.Array:
    """The cache with uint8 `rows` [B, R] stored at `slots` [B]; a slot that is none stores nothing.

    `layer` is in range (and unused unless the cache is stacked).
    """
    index, _ = _word_index(cache, slots, layer)
    words = rows.reshape(rows.shape[0], rows.shape[1] // WORD, WORD)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(2,),
        inserted_window_dims=tuple(range(cache.ndim - 1)),
        scatter_dims_to_operand_dims=tuple(range(cache.ndim)),
    )
    return lax.scatter(cache, index, words, dimensions, mode="drop")


def encode_scale(scale: jax.Array, cache_format: str) -> jax.Array:
    """The four scale bytes, uint8 [..., 4], of power-of-two f32 scales [...] (fp8 or mxfp8)."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    if cache_format == "fp8":
        return split_bytes(bits)
    exponent = (bits >> 23).astype(jnp.uint8)
    return jnp.broadcast_to(exponent[..., None], (*scale.shape, WORD))


def split_bytes(words: jax.Array) -> jax.Array:
    """uint8 [..., 4] of uint32 [...], lowest byte first.

    By shifts: exported programs with a symbolic batch cannot bitcast to another width.
    """
    return jnp.stack([(words >> shift).astype(jnp.uint8) for shift in (0, 8, 16, 24)], axis=-1)


def join_bytes(quads: jax.Array) -> jax.Array:
    """uint32 [...] of uint8 [..., 4], lowest byte first."""
    wide = quads.astype(jnp.uint32)
    return wide[..., 0] | (wide[..., 1] << 8) | (wide[..., 2] << 16) | (wide[..., 3] << 24)


@functools.partial(jax.jit, static_argnames="cache_format")
def _read_keys(
    cache: jax.Array, slots: jax.Array, layer: jax.Array | None, cache_format: str
) -> jax.Array:
    index, valid = _word_index(cache, slots, _clamp(layer, cache.shape[0]))
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(slots.ndim + 1,),
        collapsed_slice_dims=tuple(range(cache.ndim - 1)),
        start_index_map=tuple(range(cache.ndim)),
    )
    window = (1,) * (cache.ndim - 1) + (WORD,)
    words = lax.gather(cache, index, dimensions, window, mode="fill", fill_value=0)
    rows = words.reshape(*slots.shape, cache.shape[-1])
    scales = _decode_scales(rows[..., -WORD:], cache_format)
    keys = _scaled(_decode_values(rows[..., :-WORD], cache_format), scales)
    return jnp.where(valid[..., None], keys, jnp.nan)


@functools.partial(jax.jit, static_argnames="cache_format")
def _index_scores(
    query: jax.Array,
    query_scale: jax.Array | None,
    weights: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array | None,
    cache_format: str,
) -> jax.Array:
    pages, page_size, row_bytes = cache.shape[-3:]
    batch, length = block_table.shape[0], block_table.shape[1] * page_size
    known = (block_table >= 0) & (block_table < pages)
    page = jnp.where(known, block_table, 0).astype(jnp.int32)
    index = _stacked_index(cache, _clamp(layer, cache.shape[0]), page)
    stack_dims = tuple(range(cache.ndim - 2))
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(2, 3), collapsed_slice_dims=stack_dims, start_index_map=stack_dims
    )
    window = (1,) * len(stack_dims) + (page_size, row_bytes)
    taken = lax.gather(cache, index, dimensions, window, mode="promise_in_bounds")
    taken = taken.reshape(batch, block_table.shape[1], page_size * row_bytes)
    split = page_size * (row_bytes - WORD)
    values = taken[..., :split].reshape(batch, length, row_bytes - WORD)
    scales = taken[..., split:].reshape(batch, length, WORD)

    def score_row(row: tuple[jax.Array, ...]) -> jax.Array:
        query_row, weights_row, values_row, scales_row, *query_scale_row = row
        keys, key_scales = _decode_values(values_row, cache_format), 1.0
        if cache_format == "mxfp4":
            keys = _scaled(keys, _decode_scales(scales_row, cache_format))
            exponents = split_bytes(query_scale_row[0])
            heads = _decode_values(query_row, cache_format)
            heads = _scaled(heads, _decode_scales(exponents, cache_format))
        else:
            key_scales = _decode_scales(scales_row, cache_format)[:, 0]
            heads = query_row
        # Codes times powers of two are exact in bfloat16, so this dot has fp32 precision anywhere.
        dots = lax.dot_general(
            heads.astype(jnp.bfloat16),
            keys.astype(jnp.bfloat16),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        # Not jnp.maximum, which XLA on CPU (JAX 0.11 and newer) makes 0 of the NaN of a spoilt key
        positive = jnp.where(dots < 0.0, 0.0, dots)
        weighted = positive * weights_row.astype(jnp.float32)[:, None]
        return key_scales * jnp.sum(weighted, axis=0)

    rows = (query, weights, values, scales)
    scores = lax.map(score_row, rows if query_scale is None else (*rows, query_scale))
    lengths = jnp.clip(context_lens, 0, length).astype(jnp.int32)
    position = lax.broadcasted_iota(jnp.int32, (batch, length), 1)
    inside = jnp.repeat(known, page_size, axis=1) & (position < lengths[:, None])
    return jnp.where(inside, scores, -jnp.inf)


def _word_index(
    cache: jax.Array, slots: jax.Array, layer: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Where the words of each slot are, int32 [..., R/4, cache.ndim], and which slots exist, [...].

    The page of a slot that does not exist is `pages`: out of range, and never negative, which
    would count from the end.
    """
    pages, page_size, row_bytes = cache.shape[-3:]
    page, token = jnp.divmod(jnp.maximum(slots, 0), page_size)
    valid = (slots >= 0) & (page < pages)
    page = jnp.where(valid, page, pages).astype(jnp.int32)[..., None]
    token = token.astype(jnp.int32)[..., None]
    value_words, row_words = row_bytes // WORD - 1, row_bytes // WORD
    value_word = token * value_words + lax.broadcasted_iota(
        jnp.int32, (*slots.shape, value_words), slots.ndim
    )
    word = jnp.concatenate([value_word, token + page_size * value_words], axis=-1)
    row, word_in_row = jnp.divmod(word, row_words)
    page = jnp.broadcast_to(page, word.shape)
    return _stacked_index(cache, layer, page, row, word_in_row * WORD), valid


def _stacked_index(cache: jax.Array, layer: jax.Array | int, *coordinates: jax.Array) -> jax.Array:
    """Coordinates as the last axis, behind the layer if the cache is stacked."""
    if cache.ndim == 4:
        layers = jnp.full_like(coordinates[0], layer)
        coordinates = (layers, *coordinates)
    return jnp.stack(coordinates, axis=-1)


def _clamp(layer: jax.Array | None, layers: int) -> jax.Array | int:
    return 0 if layer is None else jnp.clip(layer, 0, layers - 1)


def _decode_values(codes: jax.Array, cache_format: str) -> jax.Array:
    """f32 [..., 128] of e4m3fn codes [..., 128] or packed e2m1 codes [..., 64], unscaled."""
    if cache_format != "mxfp4":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    nibbles = jnp.stack([codes & jnp.uint8(0xF), codes >> 4], axis=-1)
    nibbles = nibbles.reshape(*codes.shape[:-1], HEAD_DIM)
    step = (nibbles & jnp.uint8(7)).astype(jnp.float32)
    # 0 .5 1 1.5 | 2 3 | 4 6: the spacing doubles twice
    value = jnp.where(step < 4, step * 0.5, jnp.where(step < 6, step - 2, step * 2 - 8))
    return jnp.where(nibbles > jnp.uint8(7), -value, value)


def _decode_scales(scale_bytes: jax.Array, cache_format: str) -> jax.Array:
    """f32 scales of uint8 [..., 4]: [..., 1] for 128 columns (fp8, mxfp8), else [..., 4] for 32."""
    if cache_format == "fp8":
        return lax.bitcast_convert_type(join_bytes(scale_bytes), jnp.float32)[..., None]
    exponent = scale_bytes.astype(jnp.uint32) << 23
    exponent = jnp.maximum(exponent, jnp.uint32(0x00400000))  # UE8M0 zero is 2**-127
    scale = lax.bitcast_convert_type(exponent, jnp.float32)
    scale = jnp.where(scale_bytes == jnp.uint8(0xFF), jnp.nan, scale)
    return scale[..., :1] if cache_format == "mxfp8" else scale


def _scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Values [..., 128] times the scale of their group, [..., groups]."""
    groups = values.reshape(*scales.shape, HEAD_DIM // scales.shape[-1])
    return (groups * scales[..., None]).reshape(values.shape)
