"""The paged key cache, its one description: layout, creation, insertion, reading, slots.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dsa_front import _operator, _rules

HEAD_DIM = 128
"""Width of an indexer head and of a key, in elements."""

ROW_BYTES = {"fp8": 132, "mxfp8": 132, "mxfp4": 68}
"""Bytes of one cached token per cache format: its packed values and four scale bytes."""

WORD = 4
MAX_PAGE_SIZE = 2**25  # the position of a four-byte word in its page is an int32
MAX_PAGES = 2**31 - 2  # `pages` itself is the index of "nowhere"
SHAPES = {
    "cache": {3: "(pages, page_size, {row})", 4: "(L, pages, page_size, {row})"},
    "slots": {1: "(B,)"},
    "block_table": {2: "(S, N)"},
}

RANK = {"cache": 3}  # without layers


# Rules --------------------------------------------------------------------------------------------


def check_format(value: Any) -> str:
    """The name of a known cache format."""
    return _rules.choice("cache_format", value, ROW_BYTES)


def check_cache(cache: Any, cache_format: str) -> None:
    """Dtype and extents of a cache whose rank has been checked."""
    _rules.dtype("cache", cache, "uint8")
    if cache.shape[-1] != ROW_BYTES[cache_format]:
        rows = ", ".join(f"{name}: {size}" for name, size in ROW_BYTES.items())
        what = f"bytes per token of cache_format={cache_format!r} ({rows})"
        _rules.width("cache", cache, ROW_BYTES[cache_format], what)
    pages, page_size = cache.shape[-3:-1]
    if not (1 <= pages <= MAX_PAGES and 1 <= page_size <= MAX_PAGE_SIZE):
        raise ValueError(
            f"cache must have 1 to {MAX_PAGES} pages of 1 to {MAX_PAGE_SIZE} tokens, "
            f"got {cache.shape}"
        )
    if len(cache.shape) == 4 and page_size == 1:
        raise ValueError(
            "cache must not be a stack of pages of one token: this looks like the view "
            "(pages, page_size, 1, R) of PyTorch kernels, which is to be reshaped to "
            f"(pages, page_size, R), got {cache.shape}"
        )


def check_slots(slots: Any, cache: Any) -> Any:
    """int32 or int64 slots of any shape, as JAX can hold them; what is outside stays outside."""
    pages, page_size = cache.shape[-3:-1]
    return _rules.indices("slots", slots, pages * page_size)


# Public -------------------------------------------------------------------------------------------


def empty_cache(
    pages: int,
    page_size: int = 64,
    *,
    cache_format: str,
    layers: int | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """A cache of zeros: uint8 `[pages, page_size, R]`, with a leading axis if `layers` is given.

    R is 132 bytes per token for "fp8" and "mxfp8", 68 for "mxfp4" (`ROW_BYTES`). Zero bytes decode
    to zero keys. `sharding` places it, as in `jax.numpy.zeros(..., device=sharding)`, which inside
    jit has no effect; no device holds more than its own part meanwhile.
    Raises TypeError or ValueError if the format is unknown, `sharding` is no sharding, or a size is
    not an int in its range: `pages` below 2**31 - 1, `page_size` up to 2**25, all from 1, and
    `page_size` from 2 with `layers`.
    """
    shape = [
        _rules.integer("pages", pages, 1, MAX_PAGES),
        _rules.integer("page_size", page_size, 1, MAX_PAGE_SIZE),
    ]
    if layers is not None:
        shape.insert(0, _rules.integer("layers", layers, 1))
        _rules.integer("page_size", page_size, 2, None, "in a stack of layers")
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            f"sharding must be a jax.sharding.Sharding or None, got {type(sharding).__name__}"
        )
    return jnp.zeros([*shape, ROW_BYTES[check_format(cache_format)]], jnp.uint8, device=sharding)


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

    Raises TypeError or ValueError for arguments of a wrong type, shape or range, and
    NotImplementedError for operands on explicit mesh axes.
    """
    _rules.arrays({"cache": cache}, SHAPES, row=ROW_BYTES[check_format(cache_format)])
    check_cache(cache, cache_format)
    _rules.array("slots", slots)
    slots = check_slots(slots, cache)
    static, operand = _rules.layer(layer, {"cache": cache}, RANK, SHAPES)
    _operator.refuse_explicit_axes("read_keys", *map(jax.typeof, (cache, slots)))
    return _read_keys(cache, slots, operand if static is None else np.int32(static), cache_format)


def slots_of(block_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """The cache slots of tokens: i32 `[B, ...]` for positions `[B, ...]` in their sequences.

        slot = block_table[b // (B // S), position // page_size] * page_size + position % page_size

    block_table  int32 or int64 [S, N]: the pages of S sequences
    positions    int32 or int64 [B, ...], B a multiple of S: B / S rows in a row belong to one
                 sequence
    page_size    tokens per page

    -1, which stores nothing, stands for a position outside [0, N*page_size), where the table's
    entry is negative, and where the slot is past int32. Otherwise an entry past the end of the
    cache is passed on: how many pages there are is the cache's to know, and `index_front` ignores
    such slots.

    Raises TypeError or ValueError for arguments of a wrong type, shape or range.
    """
    _rules.arrays({"block_table": block_table}, SHAPES)
    _rules.array("positions", positions)
    if not positions.shape:
        raise ValueError(f"positions must have shape (B, ...), got {positions.shape}")
    page_size = _rules.integer("page_size", page_size, 1, MAX_PAGE_SIZE)
    check_block_table(block_table, page_size, positions.shape[0], "positions")
    block_table = _rules.indices("block_table", block_table, MAX_PAGES)
    positions = _rules.indices("positions", positions, block_table.shape[1] * page_size)
    _operator.refuse_explicit_axes("slots_of", *map(jax.typeof, (block_table, positions)))
    return _slots_of(block_table, positions, page_size)


def check_block_table(block_table: Any, page_size: int, rows: Any, name: str) -> None:
    """[S, N], whose S sequences share the B `rows` of `name` evenly; positions are int32."""
    length = block_table.shape[1] * page_size
    if isinstance(length, int) and length > _rules.INT32_MAX:
        raise ValueError(
            f"block_table must have at most {_rules.INT32_MAX} positions in a row, N * page_size, "
            f"got {block_table.shape[1]} * {page_size}"
        )
    sequences = block_table.shape[0]
    if rows != sequences and (sequences == 0 or rows % sequences != 0):
        raise ValueError(
            f"block_table must have as many rows as {name} ({rows}), or a divisor of that: one for "
            f"the rows of a sequence, which follow each other; got {block_table.shape}"
        )


# Bytes -------------------------------------------------------------------------------------------


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


@functools.partial(jax.jit, static_argnames="page_size")
def _slots_of(block_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    if 0 in (*block_table.shape, *positions.shape):
        return jnp.full(positions.shape, -1, jnp.int32)
    inside = (positions >= 0) & (positions < block_table.shape[1] * page_size)
    place = jnp.where(inside, positions, 0).astype(jnp.int32)
    rows = positions.shape[0] // block_table.shape[0]
    sequence = lax.broadcasted_iota(jnp.int32, positions.shape, 0) // rows
    page, token = block_table[sequence, place // page_size], place % page_size
    last = (_rules.INT32_MAX - token) // page_size  # of whose slots int32 holds this one
    exists = inside & (page >= 0) & (page <= last.astype(page.dtype))
    slot = jnp.where(exists, page, 0).astype(jnp.int32) * page_size + token
    return jnp.where(exists, slot, -1)


@functools.partial(jax.jit, static_argnames="cache_format")
def _read_keys(
    cache: jax.Array, slots: jax.Array, layer: jax.Array | None, cache_format: str
) -> jax.Array:
    index, valid = _word_index(cache, slots, clamp(layer, cache.shape[0]))
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(slots.ndim + 1,),
        collapsed_slice_dims=tuple(range(cache.ndim - 1)),
        start_index_map=tuple(range(cache.ndim)),
    )
    window = (1,) * (cache.ndim - 1) + (WORD,)
    words = lax.gather(cache, index, dimensions, window, mode="fill", fill_value=0)
    rows = words.reshape(*slots.shape, cache.shape[-1])
    scales = decode_scales(rows[..., -WORD:], cache_format)
    keys = scaled(decode_values(rows[..., :-WORD], cache_format), scales)
    return jnp.where(valid[..., None], keys, jnp.nan)


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
    return stacked_index(cache, layer, page, row, word_in_row * WORD), valid


def stacked_index(cache: jax.Array, layer: jax.Array | int, *coordinates: jax.Array) -> jax.Array:
    """Coordinates as the last axis, behind the layer if the cache is stacked."""
    if cache.ndim == 4:
        layers = jnp.full_like(coordinates[0], layer)
        coordinates = (layers, *coordinates)
    return jnp.stack(coordinates, axis=-1)


def clamp(layer: jax.Array | int | None, layers: int) -> jax.Array | int:
    """The layer in [0, layers - 1]; an int has been checked."""
    if layer is None or isinstance(layer, int):
        return layer or 0
    return jnp.clip(layer, 0, layers - 1)


def decode_values(codes: jax.Array, cache_format: str) -> jax.Array:
    """f32 [..., 128] of e4m3fn codes [..., 128] or packed e2m1 codes [..., 64], unscaled."""
    if cache_format != "mxfp4":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    nibbles = jnp.stack([codes & jnp.uint8(0xF), codes >> 4], axis=-1)
    nibbles = nibbles.reshape(*codes.shape[:-1], HEAD_DIM)
    step = (nibbles & jnp.uint8(7)).astype(jnp.float32)
    # 0 .5 1 1.5 | 2 3 | 4 6: the spacing doubles twice
    value = jnp.where(step < 4, step * 0.5, jnp.where(step < 6, step - 2, step * 2 - 8))
    return jnp.where(nibbles > jnp.uint8(7), -value, value)


def decode_scales(scale_bytes: jax.Array, cache_format: str) -> jax.Array:
    """f32 scales of uint8 [..., 4]: [..., 1] for 128 columns (fp8, mxfp8), else [..., 4] for 32."""
    if cache_format == "fp8":
        return lax.bitcast_convert_type(join_bytes(scale_bytes), jnp.float32)[..., None]
    exponent = scale_bytes.astype(jnp.uint32) << 23
    exponent = jnp.maximum(exponent, jnp.uint32(0x00400000))  # UE8M0 zero is 2**-127
    scale = lax.bitcast_convert_type(exponent, jnp.float32)
    scale = jnp.where(scale_bytes == jnp.uint8(0xFF), jnp.nan, scale)
    return scale[..., :1] if cache_format == "mxfp8" else scale


def scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Values [..., 128] times the scale of their group, [..., groups]."""
    groups = values.reshape(*scales.shape, HEAD_DIM // scales.shape[-1])
    return (groups * scales[..., None]).reshape(values.shape)
