"""`index_scores` in plain `jax.numpy`: specification, portable implementation and test oracle.

Axes: S sequences of n rows each (B = S * n), H heads, N pages in a row of the block table, 128
head width, T tokens of a piece.

Products are exact and sums fp32. Work goes in pieces, sequences by pages by rows, so that scratch
is bounded, and the loop over pages ends at the longest length of the piece's rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dsa_front import _cache
from jax_dsa_front._cache import WORD
from jax_dsa_front._scores.config import ScoresConfig

# Bytes of the largest arrays of a piece: its fp32 products [sequences, rows, H, T], of which XLA
# may keep two, and its decoded keys.
PRODUCTS_BYTES = 2**24
# Tokens of a piece. On CPU the products of one row then stay in a core's cache; on GPUs pieces are
# larger, because each turn of a loop costs tens of microseconds.
TOKENS = 4096
TOKENS_ON_CUDA = 16384


class Piece(NamedTuple):
    """How many sequences, rows of a sequence and pages are worked on at a time."""

    sequences: int
    rows: int
    pages: int


def reference_scores(
    config: ScoresConfig, *operands: jax.Array, on_cuda: bool = False
) -> tuple[jax.Array]:
    """`index_scores` on operands that have been checked, in the order of `ARRAYS`."""
    query, weights, cache, block_table, context_lens, *rest = operands
    query_scale = rest.pop(0) if config.cache_format == "mxfp4" else None
    layer = rest.pop(0) if config.has_layer_operand else config.layer or 0
    pages, page_size, _ = cache.shape[-3:]
    batch, heads = weights.shape
    sequences, table_pages = block_table.shape
    if batch == 0 or table_pages == 0:
        return (jnp.zeros((batch, table_pages * page_size), jnp.float32),)
    own_layer = _cache.clamp(layer, cache.shape[0])
    rows = batch // sequences
    piece = _piece(sequences, rows, heads, table_pages, page_size, on_cuda)

    known = (block_table >= 0) & (block_table < pages)
    table = jnp.where(known, block_table, -1).astype(jnp.int32)
    lengths = jnp.clip(context_lens, 0, table_pages * page_size).astype(jnp.int32)
    lengths = lengths.reshape(sequences, rows)
    decoded = _decode_query(query, query_scale)
    by_sequence = [x.reshape(sequences, rows, *x.shape[1:]) for x in (decoded, weights)]
    scores = jnp.full((sequences, rows, table_pages * page_size), -jnp.inf, jnp.float32)
    scores = scores + _zero_of(operands)

    def of_sequences(turn: jax.Array, scores: jax.Array) -> jax.Array:
        first = _start(turn, piece.sequences, sequences)
        own_table, own_lengths, *own = (
            lax.dynamic_slice_in_dim(x, first, piece.sequences)
            for x in (table, lengths, *by_sequence)
        )
        longest = jnp.max(own_lengths)
        tokens = piece.pages * page_size

        def of_pages(turn: jax.Array, scores: jax.Array) -> jax.Array:
            page = _start(turn, piece.pages, table_pages)
            entries = lax.dynamic_slice_in_dim(own_table, page, piece.pages, axis=1)
            keys, key_scales = _read_pages(cache, own_layer, entries, config.cache_format)
            position = page * page_size + lax.iota(jnp.int32, tokens)
            exists = jnp.repeat(entries >= 0, page_size, axis=1)

            def of_rows(turn: jax.Array, scores: jax.Array) -> jax.Array:
                row = _start(turn, piece.rows, rows)
                heads_of, weights_of, lengths_of = (
                    lax.dynamic_slice_in_dim(x, row, piece.rows, axis=1)
                    for x in (*own, own_lengths)
                )
                new = _score(heads_of, weights_of, keys, key_scales)
                inside = exists[:, None] & (position[None, None] < lengths_of[..., None])
                new = jnp.where(inside, new, -jnp.inf)
                return lax.dynamic_update_slice(scores, new, (first, row, page * page_size))

            return lax.fori_loop(0, _turns(rows, piece.rows), of_rows, scores)

        return lax.fori_loop(0, _turns(longest, tokens), of_pages, scores)

    scores = lax.fori_loop(0, _turns(sequences, piece.sequences), of_sequences, scores)
    return (scores.reshape(batch, table_pages * page_size),)


def _zero_of(operands: tuple[jax.Array, ...]) -> jax.Array:
    """0.0, made of every operand: inside shard_map what a loop carries has to vary from the start
    over the mesh axes over which its results vary."""
    zero = jnp.int32(0)
    for operand in operands:
        if 0 not in operand.shape:
            first = operand[(0,) * operand.ndim]
            zero = zero + (first != first).astype(jnp.int32) * 0
    return zero.astype(jnp.float32)


def _piece(
    sequences: Any, rows: Any, heads: Any, table_pages: Any, page_size: int, on_cuda: bool
) -> Piece:
    """A symbolic extent is cut into pieces of one."""
    at_a_time = max((TOKENS_ON_CUDA if on_cuda else TOKENS) // page_size, 1)
    pages = min(at_a_time, table_pages) if isinstance(table_pages, int) else 1
    heads = heads if isinstance(heads, int) else 64
    limit = max(PRODUCTS_BYTES // (4 * heads * pages * page_size), 1)
    own_rows = min(limit, rows) if isinstance(rows, int) else 1
    together = 1
    if on_cuda and isinstance(sequences, int):
        together = min(max(limit // own_rows, 1), sequences)
    return Piece(together, own_rows, pages)


def _start(turn: jax.Array, size: int, extent: int) -> jax.Array:
    """Where a piece begins. The last one may reach back into the one before it, which changes
    nothing: the same scores are written again."""
    return jnp.minimum(turn * size, extent - size).astype(jnp.int32)


def _turns(extent: jax.Array | int, size: int) -> jax.Array | int:
    return (extent + size - 1) // size


def _decode_query(query: jax.Array, query_scale: jax.Array | None) -> jax.Array:
    """bf16 [B, H, 128]. Codes times powers of two are exact in bfloat16."""
    if query_scale is None:
        return query.astype(jnp.bfloat16)
    scales = _cache.decode_scales(_cache.split_bytes(query_scale), "mxfp4")
    return _cache.scaled(_cache.decode_values(query, "mxfp4"), scales).astype(jnp.bfloat16)


def _read_pages(
    cache: jax.Array, layer: jax.Array | int, entries: jax.Array, cache_format: str
) -> tuple[jax.Array, jax.Array | None]:
    """Keys bf16 [s, T, 128] of the pages [s, pages], and f32 [s, T] what multiplies their scores.

    For an entry that is no page, those of page 0.
    """
    page_size, row_bytes = cache.shape[-2:]
    index = _cache.stacked_index(cache, layer, jnp.maximum(entries, 0))
    stack_dims = tuple(range(cache.ndim - 2))
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(2, 3), collapsed_slice_dims=stack_dims, start_index_map=stack_dims
    )
    window = (1,) * len(stack_dims) + (page_size, row_bytes)
    taken = lax.gather(cache, index, dimensions, window, mode="promise_in_bounds")
    sequences, pages = entries.shape
    taken = taken.reshape(sequences, pages, page_size * row_bytes)
    split, tokens = page_size * (row_bytes - WORD), pages * page_size
    values = taken[..., :split].reshape(sequences, tokens, row_bytes - WORD)
    scales = taken[..., split:].reshape(sequences, tokens, WORD)
    keys = _cache.decode_values(values, cache_format)
    scales = _cache.decode_scales(scales, cache_format)
    if cache_format == "mxfp4":
        return _cache.scaled(keys, scales).astype(jnp.bfloat16), None
    return keys.astype(jnp.bfloat16), scales[..., 0]


def _score(
    heads: jax.Array, weights: jax.Array, keys: jax.Array, key_scales: jax.Array | None
) -> jax.Array:
    """f32 [s, rows, T] of heads [s, rows, H, 128], weights [s, rows, H] and keys [s, T, 128]."""
    sequences, rows, count, width = heads.shape
    dots = lax.dot_general(
        heads.reshape(sequences, rows * count, width),
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.DEFAULT,  # exact: else jax_default_matmul_precision decides
        preferred_element_type=jnp.float32,
    ).reshape(sequences, rows, count, keys.shape[1])
    # Not jnp.maximum, which XLA on CPU (JAX 0.11 and newer) makes 0 of the NaN of a spoilt key
    positive = jnp.where(dots < 0.0, 0.0, dots)
    scores = jnp.sum(positive * weights.astype(jnp.float32)[..., None], axis=2)
    return scores if key_scales is None else scores * key_scales[:, None]
