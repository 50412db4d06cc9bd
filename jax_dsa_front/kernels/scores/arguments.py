"""The scorers' parameter list, and how their rows, lengths and pages are found.

A *group* is what shares one read of a key page: up to `rows` consecutive rows of a sequence. An
*item* is one page of one group."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from .. import ptx

HEAD_DIM = 128

# Bits of ScoresArguments.flags (csrc_glue/scores_params.h has the same)
FLAG_TABLE_64 = 1
FLAG_LENGTHS_64 = 2
FLAG_WEIGHTS_BF16 = 4
FLAG_MXFP8 = 8
FLAG_FILL = 16
FLAG_KEEP = 32

MAX_ENTRIES = 1024  # of the prefix sum over groups; with more groups each entry stands for several


class ScoresArguments(NamedTuple):
    """The kernels' parameters in the order of csrc_glue/scores_params.h, behind the tensor maps.

    Int64 members are device addresses unless said otherwise."""

    # What the first loads need, together: parameters come from a cold constant cache, 64 bytes at a
    # time
    block_table: Int64  # i32 or i64 [sequences, table_width]
    context_lens: Int64  # i32 or i64 [batch]
    layer: Int64  # i32 scalar, or 0: `static_layer` is the layer
    flags: Int32
    static_layer: Int32
    num_layers: Int32
    pages: Int32  # of a layer
    table_width: Int32
    rows_per_sequence: Int32
    groups: Int32
    groups_per_sequence: Int32
    # CTA c begins with group c % min(groups, CTAs); that is c - (c * reciprocal >> 20) * min(...)
    reciprocal: Int32
    ctas_per_group: Int32  # CTAs / min(groups, CTAs), rounded down, and
    groups_with_more: Int32  # how many groups have one more

    entries: Int32  # of the prefix sum
    groups_per_entry: Int32
    search_steps: Int32  # of a binary search over the entries
    batch: Int32
    weights: Int64  # bf16 or f32 [batch, heads]
    scores: Int64  # f32 [batch, table_width * page size]
    query: Int64  # mxfp4: packed e2m1 [batch, heads, 64]
    query_scale: Int64  # mxfp4: u32 [batch, heads]
    cache: Int64  # mxfp4: u8 [layers, pages, page bytes]


def scores_arguments(**given):
    """The parameters with these values; 0 for all others."""
    kinds = ScoresArguments.__annotations__
    return ScoresArguments(**{name: kind(given.get(name, 0)) for name, kind in kinds.items()})


@cute.jit
def chosen_layer(arguments):
    """The layer of the cache: the host's, or the device's clamped to the stack."""
    layer = arguments.static_layer
    if arguments.layer != 0:
        wanted = ptx.load_global_i32(arguments.layer)
        layer = cutlass.max(Int32(0), cutlass.min(wanted, arguments.num_layers - 1))
    return layer


def load_length(arguments, row):
    return ptx.load_global_words(
        arguments.context_lens, Int64(row), arguments.flags & FLAG_LENGTHS_64
    )


def load_entry(arguments, sequence, column):
    index = Int64(sequence) * arguments.table_width + column
    return ptx.load_global_words(arguments.block_table, index, arguments.flags & FLAG_TABLE_64)


def length_of(arguments, words, limit):
    """The length in the words of `load_length`, clamped to [0, limit]."""
    low, high = words
    high = select(arguments.flags & FLAG_LENGTHS_64, high, low >> 31)
    length = Int32(cutlass.min(Uint32(low), Uint32(limit)))
    return select(high < 0, Int32(0), select(high > 0, limit, length))


def page_of(arguments, words):
    """The page that the words of `load_entry` name, or -1 if they name none."""
    low, high = words  # a narrow entry has a high word of 0
    return select((Uint32(low) < Uint32(arguments.pages)) & (high == 0), low, Int32(-1))


@cute.jit
def rows_of(arguments, group, rows: cutlass.Constexpr):
    """(sequence, first row, number of rows) of a group."""
    sequence, row, count = group, group, Int32(1)
    if arguments.rows_per_sequence != 1:
        sequence = divide(group, arguments.groups_per_sequence)
        first = (group - sequence * arguments.groups_per_sequence) * rows
        row = sequence * arguments.rows_per_sequence + first
        count = cutlass.min(Int32(rows), arguments.rows_per_sequence - first)
    return sequence, row, count


def load_lengths(arguments, row, count, rows):
    """The words of a group's lengths; rows that it does not have repeat the last."""
    return [load_length(arguments, row + cutlass.min(Int32(r), count - 1)) for r in range(rows)]


def longest_of(arguments, words, limit):
    longest = length_of(arguments, words[0], limit)
    for more in words[1:]:
        longest = cutlass.max(longest, length_of(arguments, more, limit))
    return longest


def select(condition, chosen, other):
    kind = type(other)
    return kind(cutlass.select_(Boolean(condition), kind(chosen), other))


def divide(left, right):
    """Of numbers that are not negative: as unsigned ones it takes half the instructions."""
    return Int32(Uint32(left) // Uint32(right))
