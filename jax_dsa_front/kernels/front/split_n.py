"""Small batches: one head per cluster of 4 CTAs, each with 32 of the head's 128 rows and all of K.

A CTA's piece of `wq_b` is one contiguous block, brought in by 8 bulk copies. Each CTA reads a
quarter of the columns of the activations and multicasts it to the four. Eight warps split K; the
weights are the A operand of mma.sync, the normalised rows stay in registers as B.  Only the
amplitude of a head (4 bytes per row and CTA) goes back through the cluster.  A ninth warp issues
the copies and inserts the keys.  docs/kernels.md has the picture.

Runs on any architecture with clusters (sm_90 and later).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import arithmetic, ptx
from ..cta import SharedMemory, lane_sum, open_barriers, shared_address
from .arguments import (
    FLAG_MXFP4,
    FrontArguments,
    chosen_layer,
    first_head,
    load_head_weight,
    store_weight,
)
from .key import insert_key
from .quantise import FP8_QUERY_FLOOR, fp4_codes, fp4_scale, fp8_scale, magnitude

CLUSTER = 4
ROWS = 32  # of wq_b per CTA
TILE = 8  # batch rows: N of the mma
WARPS = 8
THREADS = 32 * (WARPS + 1)
COPIES = 8  # of 4 rows each
# Copies of weights that start before those of the activations, and before the warps have read the
# activations. Both tune one thing: activations behind the whole stream take 3-7 k clocks instead of
# 1 k, and the stream must not run dry while they are waited for. One copy more or less on either
# side costs 2 to 15 % (docs/kernels.md).
EARLY_COPIES = 1
LATE_COPIES = 4
CHAINS = 2  # independent accumulators per 16 rows
SUM_PITCH = 36  # floats per batch row of the partial sums: 4 too many, against bank conflicts

# mbarriers: one per pair of copies, then
BAR_GAMMA = COPIES // 2
BAR_ROWS = BAR_GAMMA + 1
BAR_PEAKS = BAR_ROWS + 1
BARS = BAR_PEAKS + 1

# Named barriers
BARRIER_ROWS_READ = 1
BARRIER_SQUARES = 2
BARRIER_SUMS = 3


class SplitN:
    """The kernel for one K; the batch is a run-time argument, tiles of 8 rows lie along grid z.

    `converts_fp4`: whether the architecture has an instruction that converts to e2m1.
    """

    cluster = CLUSTER
    threads = THREADS

    def __init__(self, k, converts_fp4=False):
        self.k = k
        self.converts_fp4 = converts_fp4
        # Odd copies are shifted by 64 bytes: a quarter warp then reads 128 bytes in 32 different
        # banks.
        self.copy_bytes = 4 * 2 * k
        self.pair_bytes = 2 * self.copy_bytes + 128
        # The rows lie where the late copies go later, and may reach into the sums. Odd rows are
        # shifted by 64 bytes: a quarter warp reads 64 bytes of each of two rows.
        self.row_pitch = 2 * k + 64
        self.rows_offset = -(-LATE_COPIES // 2) * self.pair_bytes
        self.shared = SharedMemory(
            {
                "weights": (COPIES // 2 * self.pair_bytes, 128),
                "sums": (WARPS * TILE * SUM_PITCH * 4, 128),  # f32 [warp][batch row][head row]
                "gamma": (2 * k, 128),
                "squares": (WARPS * TILE * 4, 128),  # f32 [warp][batch row]
                "peaks": (CLUSTER * TILE * 4, 128),  # bits of an amplitude [CTA][batch row]
                "bars": (BARS * 8, 8),
            }
        )
        space = sum(self.shared.regions[name][0] for name in ("weights", "sums"))
        assert self.rows_offset + TILE * self.row_pitch <= space

    @cute.jit
    def __call__(self, arguments: FrontArguments, stream):
        tiles = (arguments.batch + (TILE - 1)) // TILE
        # The grid's y is the number of heads; no launch happens here, the handler sets the grid.
        self.kernel(arguments).launch(
            grid=(CLUSTER, 1, tiles),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            stream=stream,
            min_blocks_per_mp=2 if self.k <= 1536 else 1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, arguments: FrontArguments):
        thread, _, _ = cute.arch.thread_idx()
        part, head, tile = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        row0 = tile * TILE
        rows = cutlass.min(Int32(TILE), arguments.batch - row0)

        shared = {name: shared_address(pointer) for name, pointer in self.shared.allocate().items()}
        shared["rows"] = shared["weights"] + self.rows_offset
        if warp == WARPS:
            self.produce(arguments, shared, part, head, heads, tile, rows, lane)
        else:
            self.compute(arguments, shared, part, head, heads, row0, rows, warp, lane)

    @cute.jit
    def produce(self, arguments, shared, part, head, heads, tile, rows, lane):
        weights, bars = shared["weights"], shared["bars"]
        cute.arch.griddepcontrol_wait()
        layer, inside = chosen_layer(arguments)
        first_row = layer * arguments.wq_b_layer_rows + head * 128 + part * ROWS
        source = arguments.wq_b + Int64(first_row) * (2 * self.k)
        policy = ptx.evict_first_policy()
        # Before the first copy its barrier alone: an initialisation takes some 40 clocks.
        open_barriers([(bars, 2 * self.copy_bytes)])
        with cute.arch.elect_one():
            self.copy_weights(weights, source, bars, policy, 0, EARLY_COPIES)
        rows_and_peaks = [(BAR_ROWS, 2 * self.k * rows), (BAR_PEAKS, CLUSTER * 4 * rows)]
        open_barriers([(bars + 8 * bar, nbytes) for bar, nbytes in rows_and_peaks])
        ptx.cluster_arrive_relaxed()
        ptx.cluster_wait()  # all barriers are initialised, the peers' too
        quarter = 2 * self.k // CLUSTER  # bytes of a row
        with cute.arch.elect_one():
            target = shared["rows"] + part * quarter
            x = arguments.projected + Int64(TILE * tile) * arguments.projected_pitch
            x = x + part * quarter
            for _ in range(rows):
                ptx.bulk_copy_multicast(target, x, quarter, bars + 8 * BAR_ROWS, 2**CLUSTER - 1)
                target = target + self.row_pitch
                x = x + arguments.projected_pitch
            q_norm = arguments.q_norm + Int64(layer) * arguments.q_norm_layer_stride
            ptx.bulk_copy(shared["gamma"], q_norm, 2 * self.k, bars + 8 * BAR_GAMMA)
            self.copy_weights(weights, source, bars, policy, EARLY_COPIES, LATE_COPIES)
        cute.arch.barrier(barrier_id=BARRIER_ROWS_READ, number_of_threads=THREADS)
        with cute.arch.elect_one():
            self.copy_weights(weights, source, bars, policy, LATE_COPIES, COPIES)
        _, _, tiles = cute.arch.grid_dim()
        for row in range(
            (tile * heads + head) * CLUSTER + part, arguments.batch, CLUSTER * heads * tiles
        ):
            insert_key(arguments, row, layer, inside, lane, self.converts_fp4)

    def copy_weights(self, weights, source, bars, policy, first, last):
        """Starts copies `first` to `last` - 1; two of them share a barrier."""
        for i in range(first, last):
            ptx.bulk_copy(
                weights + i // 2 * self.pair_bytes + i % 2 * (self.copy_bytes + 64),
                source + i * self.copy_bytes,
                self.copy_bytes,
                bars + 8 * (i // 2),
                policy,
            )

    @cute.jit
    def compute(self, arguments, shared, part, head, heads, row0, rows, warp, lane):
        weights, sums, gamma, squares = (shared[n] for n in ("weights", "sums", "gamma", "squares"))
        bars = shared["bars"]
        steps = self.k // WARPS // 32  # of 32 columns per warp
        group, quad = lane >> 2, lane & 3
        columns = (
            warp * (self.k // WARPS * 2) + quad * 16
        )  # byte offset of this lane's first 8 columns
        if warp == 0:
            others = [(pair, 2 * self.copy_bytes) for pair in range(1, COPIES // 2)]
            others.append((BAR_GAMMA, 2 * self.k))
            open_barriers([(bars + 8 * bar, nbytes) for bar, nbytes in others])
        ptx.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        raw_weight = load_head_weight(
            arguments, row0 + cutlass.min(warp, rows - 1), first_head(arguments) + head
        )

        # Lanes of absent rows repeat the last one: their columns of the product are never used.
        ptx.cluster_wait()  # before the peers' copies
        ptx.mbarrier_wait(bars + 8 * BAR_ROWS, 0)
        source = shared["rows"] + cutlass.min(group, rows - 1) * self.row_pitch + columns
        x = [ptx.load_shared_16b(source + 64 * step) for step in range(steps)]

        # RMSNorm: this warp's part of each row's sum of squares, then all parts in warp order
        total = Float32(0)
        for step in cutlass.range_constexpr(steps):
            for word in x[step]:
                total = arithmetic.sum_squares(word, total)
        total = lane_sum(total, (1, 2))
        if quad == 0:
            ptx.store_shared_f32(squares + (warp * TILE + group) * 4, total)
        cute.arch.barrier_arrive(barrier_id=BARRIER_ROWS_READ, number_of_threads=THREADS)
        cute.arch.barrier(barrier_id=BARRIER_SQUARES, number_of_threads=32 * WARPS)
        total = Float32(0)
        for i in cutlass.range_constexpr(WARPS):
            total = total + ptx.load_shared_f32(squares + (i * TILE + group) * 4)
        rr = arithmetic.reciprocal_sqrt(total * Float32(1 / self.k) + arguments.eps)
        ptx.mbarrier_wait(bars + 8 * BAR_GAMMA, 0)
        y = []
        for step in cutlass.range_constexpr(steps):
            g = ptx.load_shared_16b(gamma + columns + 64 * step)
            y.append([arithmetic.norm_pair(x[step][i], g[i], rr) for i in range(4)])

        # Weights and rows use the same order of K inside a step, so a lane's 16 bytes serve as they
        # lie.
        lane_weights = (
            weights + (group & 1) * (self.copy_bytes + 64) + (group >> 1) * (2 * self.k) + columns
        )
        partial = []
        for half in cutlass.range_constexpr(
            2
        ):  # 16 rows: one of 8 from each of two pairs of copies
            # Several accumulators, because one would be a chain of dependent mma of 33 clocks each
            accumulators = [[Float32(0)] * 4 for _ in range(CHAINS)]
            base = lane_weights + 2 * half * self.pair_bytes
            ptx.mbarrier_wait(bars + 16 * half, 0)
            if cutlass.const_expr(half == 1):  # read what is there while the last copies arrive
                upper = [ptx.load_shared_16b(base + 64 * step) for step in range(steps)]
            ptx.mbarrier_wait(bars + 16 * half + 8, 0)
            for step in cutlass.range_constexpr(steps):
                u = upper[step] if half == 1 else ptx.load_shared_16b(base + 64 * step)
                v = ptx.load_shared_16b(base + self.pair_bytes + 64 * step)
                for i in cutlass.range_constexpr(2):
                    a = (u[2 * i], v[2 * i], u[2 * i + 1], v[2 * i + 1])
                    chain = (2 * step + i) % CHAINS
                    accumulators[chain] = arithmetic.mma_16x8x16(
                        accumulators[chain], a, y[step][2 * i : 2 * i + 2]
                    )
            total = accumulators[0]
            for other in accumulators[1:]:
                total = [total[e] + other[e] for e in range(4)]
            partial.append(total)

        column = 4 * (group & 1) + (group >> 1)  # of the head, as the copies lie
        target = sums + ((warp * TILE + 2 * quad) * SUM_PITCH + column) * 4
        for half in cutlass.range_constexpr(2):
            for upper in cutlass.range_constexpr(2):
                offset = (16 * half + 8 * upper) * 4
                ptx.store_shared_f32(target + offset, partial[half][2 * upper])
                ptx.store_shared_f32(target + offset + SUM_PITCH * 4, partial[half][2 * upper + 1])
        cute.arch.barrier(barrier_id=BARRIER_SUMS, number_of_threads=32 * WARPS)

        self.finish(arguments, shared, raw_weight, part, head, heads, row0, rows, warp, lane)

    @cute.jit
    def finish(self, arguments, shared, raw_weight, part, head, heads, row0, rows, warp, lane):
        """Adds the partial sums and quantises: one batch row per warp, one of the head's columns
        per lane."""
        sums, peaks = shared["sums"], shared["peaks"]
        bar_peaks = shared["bars"] + 8 * BAR_PEAKS
        if warp < rows:
            source = sums + (warp * SUM_PITCH + lane) * 4
            s = [ptx.load_shared_f32(source + i * (TILE * SUM_PITCH * 4)) for i in range(WARPS)]
            total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
            value = arithmetic.round_bf16(total)
            peak = cute.arch.warp_redux_sync(magnitude(value), "max")
            index = Int64(row0 + warp) * heads + head
            if (
                arguments.flags & FLAG_MXFP4
            ) != 0:  # 32 columns are one group: nothing crosses the cluster
                exponent, inverse = fp4_scale(peak)
                code = fp4_codes([value], inverse, self.converts_fp4)
                pair = code | (cute.arch.shuffle_sync_bfly(code, 1) << 4)
                if (lane & 1) == 0:
                    column = part * (ROWS // 2) + (lane >> 1)
                    ptx.store_global_u8(arguments.query + index * 64 + column, pair)
                if lane == 0:
                    ptx.store_global_u8(arguments.query_scale + index * 4 + part, exponent)
                    if part == 0:
                        store_weight(arguments, index, raw_weight, Float32(1))
            else:
                if lane < CLUSTER:
                    slot = peaks + (part * TILE + warp) * 4
                    ptx.store_cluster_async(
                        ptx.peer_address(slot, lane), peak, ptx.peer_address(bar_peaks, lane)
                    )
                ptx.mbarrier_wait(bar_peaks, 0, "cluster")
                amax = Uint32(FP8_QUERY_FLOOR)
                for i in cutlass.range_constexpr(CLUSTER):
                    amax = arithmetic.max_u32(
                        amax, arithmetic.bits(ptx.load_shared_f32(peaks + (i * TILE + warp) * 4))
                    )
                scale, inverse = fp8_scale(amax)
                code = arithmetic.e4m3_pair(arithmetic.multiply(value, inverse), Float32(0))
                ptx.store_global_u8(arguments.query + index * 128 + part * ROWS + lane, code)
                if (part == 0) & (lane == 0):
                    store_weight(arguments, index, raw_weight, arithmetic.float_of(scale))
        elif (arguments.flags & FLAG_MXFP4) == 0:
            # A CTA may only end when nothing more will be stored in it.
            ptx.mbarrier_wait(bar_peaks, 0, "cluster")
