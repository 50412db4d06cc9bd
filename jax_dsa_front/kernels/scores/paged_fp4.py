"""Scores of paged e2m1 keys on Hopper, which multiplies no e2m1: the schedule of paged.py, with the
codes widened to bf16 on the way into wgmma.

The keys are operand A, from registers. A thread's part of it is two keys and, in every 16 columns,
four of them; since the same columns may be paired in any order, thread q of a quad takes the 16
bytes of scale group q: one load, one scale. The query is widened once per group of rows by the
issuing warp, in the same order, into shared memory.

All of it is exact. A code's three magnitude bits, put where bf16 has its lowest exponent bits and
its highest mantissa bit, are its value times 2**-126, subnormals included. One multiplication turns
them into value * 2**(exponent - largest exponent of the key); the largest exponent is the key's
scale, as in the other formats.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .. import arithmetic, ptx
from .arguments import FLAG_WEIGHTS_BF16, HEAD_DIM, ScoresArguments, select
from .paged import THREADS, Paged, map_address, power_of_two

CODE_BYTES = HEAD_DIM // 2  # of a key or head
SIGNS, MAGNITUDES = 0x80008000, 0x01C001C0
UP_126 = 0x7E807E80  # 2**126, twice
EXPONENT_STEP = 0x00800080  # 1 in both exponents of a bf16 pair


class PagedFp4(Paged):
    most_stages = 16
    query_comes_first = False  # widening it takes the issuer a thousand clocks

    def sizes(self):
        page_bytes = self.page_size * (CODE_BYTES + 4)
        return page_bytes, page_bytes, self.columns * HEAD_DIM * 2

    @cute.jit
    def __call__(self, arguments: ScoresArguments, stream):
        (keys,) = self.tensor_maps(arguments, 1)
        # No launch happens here: the handler sets the grid.
        self.kernel(keys, arguments).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, keys: cute.CopyAtom, arguments: ScoresArguments):
        self.run(arguments, [map_address(keys)])

    @cute.jit
    def copy_query(self, arguments, maps, shared, slot, row, count, lane):
        """Widens the heads of a group's rows: eight at a time, a scale group per lane. Where the
        group has fewer rows, its last head stands for those that are missing."""
        first, quarter = Int64(row) * self.heads, lane & 3
        last = count * self.heads - 1
        codes, scales = [], []
        for i in cutlass.range_constexpr(self.columns // 8):
            head = first + cutlass.min(8 * i + (lane >> 2), last)
            source = arguments.query + head * CODE_BYTES + quarter * 16
            codes.append(ptx.load_global_16b_if(source, Int32(1)))
            scales.append(ptx.load_global_i32(arguments.query_scale + head * 4))
        queries = shared["queries"] + slot * self.query_bytes
        for i in cutlass.range_constexpr(self.columns // 8):
            exponent = (Uint32(scales[i]) >> (Uint32(quarter) * 8)) & 0xFF
            factor = power_of_two(exponent)  # its upper half is the same number as bf16
            factor = factor | (factor >> 16)
            target = queries + (8 * i + (lane >> 2)) * 128 + quarter * 4
            for m in cutlass.range_constexpr(4):
                for j, pair in enumerate(widened(codes[i][m])):
                    pair = arithmetic.multiply_bf16_pair(pair, Uint32(UP_126))
                    pair = arithmetic.multiply_bf16_pair(pair, factor)
                    piece = (4 * m + j) % 8  # of 16 bytes in this half of the head
                    address = target + (m // 2) * (self.columns * 128)
                    ptx.store_shared_u32(address + ((piece ^ (lane >> 2)) << 4), pair)
        ptx.fence_async_shared()
        cute.arch.sync_warp()
        width = Int32(4)
        if (arguments.flags & FLAG_WEIGHTS_BF16) != 0:
            width = Int32(2)
        with cute.arch.elect_one():
            bar = shared["bars_query"] + 8 * slot
            nbytes = count * self.heads * width
            ptx.mbarrier_expect(bar, nbytes)
            source = arguments.weights + first * width
            ptx.bulk_copy(shared["weights"] + slot * (self.columns * 4), source, nbytes, bar)

    def multiply(self, arguments, page, queries, tile, warp, lane):
        quarter = lane & 3
        key = tile * 64 + (warp & 3) * 16 + (lane >> 2)
        halves, largest = [], []  # of the lower and the upper key
        for k in (key, key + 8):
            codes = ptx.load_shared_16b(page + k * CODE_BYTES + quarter * 16)
            scales = ptx.load_shared_u32(page + self.page_size * CODE_BYTES + k * 4)
            both = arithmetic.max_u16x2(scales & 0x00FF00FF, (scales >> 8) & 0x00FF00FF)
            largest.append(arithmetic.max_u32(both & 0xFFFF, both >> 16))
            exponent = (scales >> (Uint32(quarter) * 8)) & 0xFF
            # 2**(126 + exponent - largest); what lies 2**253 below the largest group is 0
            difference = Int32(exponent) - Int32(largest[-1]) + 253
            factor = Uint32(cutlass.max(Int32(0), difference)) * Uint32(EXPONENT_STEP)
            pairs = [pair for word in codes for pair in widened(word)]
            halves.append([arithmetic.multiply_bf16_pair(pair, factor) for pair in pairs])
        operand = [halves[k][2 * s + u] for s in range(8) for u in range(2) for k in range(2)]
        accumulator = arithmetic.wgmma_64xnx128_bf16(
            operand, arithmetic.swizzled_descriptor(queries), self.columns
        )
        scale = power_of_two(select(lane & 1, largest[1], largest[0]))
        return accumulator, arithmetic.float_of(scale)


def widened(word):
    """The eight codes of a word as bf16 times 2**-126: pair j is codes j and j + 4."""
    pairs = []
    for j in range(4):
        signs = word << (12 - 4 * j) if j < 3 else word
        magnitudes = word << (6 - 4 * j) if j < 2 else word >> (4 * j - 6)
        pairs.append((signs & Uint32(SIGNS)) | (magnitudes & Uint32(MAGNITUDES)))
    return pairs
