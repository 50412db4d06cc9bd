"""Larger batches on Hopper: one head and one batch tile per cluster of 2 CTAs, each with all 128
rows and half of K.

The weights are the A operand of wgmma and come as 128-byte swizzled TMA tiles through a ring; the
normalised rows are B, with the batch as N.  Each CTA finishes half of the tile's rows: it sends the
partial sums of the others to its peer.  A ninth warp issues the copies and inserts the keys.
docs/kernels.md has the picture.

Clusters of 2 with one CTA per SM fit 66 times on 132 SMs, clusters of 4 only 30 times.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.nvgpu import cpasync

from .. import arithmetic, ptx
from ..cta import SharedMemory, lane_max, lane_sum, open_barriers, shared_address
from .arguments import (
    FLAG_MXFP4,
    FrontArguments,
    chosen_layer,
    first_head,
    load_head_weight,
    store_weight,
)
from .key import insert_key
from .quantise import FP8_QUERY_FLOOR, fp4_codes, fp4_scale, fp8_scale, fp8_word

CLUSTER = 2
WARPS = 8
THREADS = 32 * (WARPS + 1)
CHUNK = 64  # columns of K per ring slot: one 128-byte swizzle row
CHUNK_BYTES = 128 * CHUNK * 2
SHARED_LIMIT = 232448  # bytes per CTA on sm_90
# Weight chunks whose copies start at once, and until the barriers are there (1,700 clocks); the
# others wait until the activations have arrived. Behind the whole stream these would take 3-7 k
# clocks, and the stream must not run dry meanwhile: docs/kernels.md has what else was tried.
EARLY_CHUNKS = 2
MIDDLE_CHUNKS = 4
FIRST_CHUNKS = 4  # of the first piece of y; the partial sums take their place in y
MAGNITUDES = 0x7FFF7FFF  # of two packed bf16

# Named barriers
BARRIER_ROWS_LANDED = 1
BARRIER_NORMALISED = 2


class SplitK:
    """The kernel for one K and one tile of batch rows; the batch is a run-time argument, tiles lie
    along grid y."""

    cluster = CLUSTER
    threads = THREADS

    def __init__(self, k, tile):
        self.k, self.tile = k, tile
        self.half_k = k // CLUSTER
        self.chunks = self.half_k // CHUNK
        self.slot_bytes = CHUNK_BYTES
        self.reuse_chunk = FIRST_CHUNKS
        regions = {
            "y": (
                tile * self.half_k * 2,
                1024,
            ),  # bf16 [chunk][batch row][64], swizzled; then the partial sums
            "gamma": (self.half_k * 2, 128),
            "squares": (CLUSTER * tile * 4, 128),  # f32 [half of K][finishing CTA][row]
        }
        # What is left of the CTA's shared memory holds weights, each slot with two barriers
        fixed = SharedMemory(regions).nbytes() + 3 * 8
        self.ring = min(self.chunks, (SHARED_LIMIT - fixed) // (CHUNK_BYTES + 2 * 8))
        self.shared = SharedMemory(
            {
                "weights": (self.ring * CHUNK_BYTES, 1024),
                **regions,
                # mbarriers: a full one per slot, squares, sums, free, an empty one per slot
                "bars": ((2 * self.ring + 3) * 8, 8),
            }
        )
        self.check_ring()
        assert self.ring >= MIDDLE_CHUNKS
        self.pieces = -(-self.half_k // 256)  # of 16 bytes per lane and row
        self.deal_finished_rows()

    def check_ring(self):
        assert self.shared.nbytes() <= SHARED_LIMIT
        assert (self.chunks - 1) // self.ring <= 2  # else the parities of `reopen_slot` pass 1
        assert 0 < self.reuse_chunk < self.chunks  # else nobody opens the place of the sums

    def deal_finished_rows(self):
        """How the CTA's half of the tile is dealt to its lanes in the end: in one pass if a row can
        have 8 lanes or more."""
        self.row_lanes = max(8, 32 * WARPS // (self.tile // 2))
        self.passes = self.tile // 2 * self.row_lanes // (32 * WARPS)

    @cute.jit
    def __call__(self, arguments: FrontArguments, stream):
        atom, coordinates = self.weight_tiles(arguments)
        tiles = (arguments.batch + (self.tile - 1)) // self.tile
        # The grid's z is the number of heads; no launch happens here, the handler sets the grid.
        self.kernel(atom, coordinates, arguments).launch(
            grid=(CLUSTER, tiles, 1),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def weight_tiles(self, arguments):
        """The TMA atom of one chunk of a head's weights, and the coordinates of all of them.

        Row 2 i + h of each 16 rows of wq_b is row 8 h + i of the tile: accumulator rows g and g + 8
        of a thread are then neighbouring columns of the head. The extent in 16-row groups is the
        handler's to set in the descriptor.
        """
        k, tile_shape = self.k, (8, 2, 8, CHUNK)
        weights = cute.make_tensor(
            cute.make_ptr(BFloat16, arguments.wq_b, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((8, 2, 1 << 20, k), stride=(2 * k, k, 16 * k, 1)),
        )
        shared = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout(tile_shape, stride=(CHUNK, 8 * CHUNK, 16 * CHUNK, 1)),
        )
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), weights, shared, tile_shape
        )

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, coordinates: cute.Tensor, arguments: FrontArguments):
        thread, _, _ = cute.arch.thread_idx()
        part, tile, head = cute.arch.block_idx()
        _, tiles, heads = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)

        rows = self.shares(arguments.batch, part, tile, tiles)
        own_row, _, own, others = rows
        pointers = self.shared.allocate()
        shared = {name: shared_address(pointer) for name, pointer in pointers.items()}
        shared["bar_squares"] = shared["bars"] + 8 * self.ring
        shared["bar_sums"] = shared["bar_squares"] + 8
        shared["bar_free"] = shared["bar_sums"] + 8
        shared["bar_empty"] = shared["bar_free"] + 8
        if warp == WARPS:
            with cute.arch.elect_one():  # by all lanes it would take 2,000 clocks
                cpasync.prefetch_descriptor(atom)
            cute.arch.griddepcontrol_wait()
            layer, inside = chosen_layer(arguments)
            bars = cute.recast_ptr(pointers["bars"], dtype=Uint64)
            source, target = self.weight_copies(atom, coordinates, pointers, arguments, layer, head)
            policy = ptx.evict_first_policy()
            for chunk in cutlass.range_constexpr(EARLY_CHUNKS):
                self.open_slot(shared, chunk)
                self.copy_chunk(atom, source, target, bars, policy, part, chunk)
            with cute.arch.elect_one():
                ptx.mbarrier_init(shared["bar_squares"], 1)
                ptx.mbarrier_init_fence()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                nbytes = CLUSTER * 4 * (own + others) + 2 * self.half_k  # squares and gamma
                ptx.mbarrier_expect(shared["bar_squares"], nbytes)
                q_norm = arguments.q_norm + Int64(layer) * arguments.q_norm_layer_stride
                ptx.bulk_copy(
                    shared["gamma"],
                    q_norm + part * (2 * self.half_k),
                    2 * self.half_k,
                    shared["bar_squares"],
                )
            cute.arch.sync_warp()
            for slot in cutlass.range_constexpr(EARLY_CHUNKS, self.ring):
                self.open_slot(shared, slot)
            ptx.cluster_arrive_relaxed()
            ptx.cluster_wait()  # warp 0 has initialised the other barriers
            for chunk in cutlass.range_constexpr(EARLY_CHUNKS, MIDDLE_CHUNKS):
                self.copy_chunk(atom, source, target, bars, policy, part, chunk)
            cute.arch.barrier(barrier_id=BARRIER_ROWS_LANDED, number_of_threads=THREADS)
            for chunk in cutlass.range_constexpr(MIDDLE_CHUNKS, self.ring):
                self.copy_chunk(atom, source, target, bars, policy, part, chunk)
            for chunk in cutlass.range_constexpr(self.ring, self.chunks):
                self.reopen_slot(shared, chunk)
                self.copy_chunk(atom, source, target, bars, policy, part, chunk)
            cta = (head * tiles + tile) * CLUSTER + part
            for row in range(cta, arguments.batch, CLUSTER * tiles * heads):
                insert_key(arguments, row, layer, inside, lane)
        else:
            cute.arch.griddepcontrol_wait()
            x = self.load_rows(arguments, part, rows, warp, lane)
            if warp == 0:
                self.initialise_barriers(shared, self.ring, own)
            ptx.cluster_arrive_relaxed()
            raw_weights = self.load_head_weights(arguments, own_row, head, warp, lane)
            ptx.cluster_wait()  # both CTAs' barriers are initialised
            norms = self.reciprocal_norms(arguments, shared, x, part, rows, warp, lane)
            accumulator = [Float32(0)] * (self.tile // 2)
            # The tensor cores start on the first piece while the others are normalised.
            self.store_normalised(shared, x, norms, warp, lane, 0, 1)
            accumulator = self.multiply(accumulator, shared, warp, lane, 0, FIRST_CHUNKS)
            self.store_normalised(shared, x, norms, warp, lane, 1, self.pieces)
            accumulator = self.multiply(accumulator, shared, warp, lane, FIRST_CHUNKS, self.chunks)
            accumulator = arithmetic.wgmma_wait(accumulator, 0)
            self.exchange(accumulator, shared, part, own, others, warp, lane)
            self.finish(arguments, shared, raw_weights, own_row, own, head, heads, warp, lane)

    def open_slot(self, shared, slot):
        """In front of its first copy, because all barriers in front of all copies took 900
        clocks."""
        open_barriers([(shared["bars"] + 8 * slot, self.slot_bytes)])

    @cute.jit
    def initialise_barriers(self, shared, first: cutlass.Constexpr, own):
        """Those of the ring from slot `first` on, and those that no copy from memory needs, while
        the first copies are on their way. By one lane: by several it would be a loop over them."""
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(self.ring):
                if cutlass.const_expr(slot >= first):
                    ptx.mbarrier_init(shared["bars"] + 8 * slot, 1)
                ptx.mbarrier_init(shared["bar_empty"] + 8 * slot, WARPS)
            ptx.mbarrier_init(shared["bar_free"], CLUSTER * WARPS)
            ptx.mbarrier_init(shared["bar_sums"], 1)
            ptx.mbarrier_init_fence()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(first, self.ring):
                ptx.mbarrier_expect(shared["bars"] + 8 * slot, self.slot_bytes)
            ptx.mbarrier_expect(shared["bar_sums"], own * 512)
        cute.arch.sync_warp()

    @cute.jit
    def reopen_slot(self, shared, chunk: cutlass.Constexpr):
        """Waits until the slot of `chunk` has been read, and expects its bytes once more."""
        slot = chunk % self.ring
        ptx.mbarrier_wait(shared["bar_empty"] + 8 * slot, chunk // self.ring - 1)
        with cute.arch.elect_one():
            ptx.mbarrier_expect(shared["bars"] + 8 * slot, self.slot_bytes)

    def shares(self, batch, part, tile, tiles):
        """(first own row, first row of the peer, how many of each): the batch dealt out evenly."""
        share = (batch + (CLUSTER * tiles - 1)) // (CLUSTER * tiles)
        own_row = (tile * CLUSTER + part) * share
        peer_row = (tile * CLUSTER + (part ^ 1)) * share
        own = cutlass.max(Int32(0), cutlass.min(share, batch - own_row))
        others = cutlass.max(Int32(0), cutlass.min(share, batch - peer_row))
        return own_row, peer_row, own, others

    def weight_copies(self, atom, coordinates, pointers, arguments, layer, head):
        """Source and target of the copies of the head's weights, by chunk of K and by slot."""
        layout = cute.make_layout(
            (8, 2, 8, CHUNK, self.ring),
            stride=(CHUNK, 8 * CHUNK, 16 * CHUNK, 1, self.slot_bytes // 2),
        )
        ring = cute.make_tensor(
            cute.recast_ptr(pointers["weights"], cute.make_swizzle(3, 4, 3), dtype=BFloat16),
            layout,
        )
        tiles_of_head = cute.local_tile(coordinates, (8, 2, 8, CHUNK), (0, 0, None, None))
        target, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring, 0, 4),
            cute.group_modes(tiles_of_head, 0, 4),
        )
        first = layer * (arguments.wq_b_layer_rows // 128) + head
        return source[None, first, None], target

    def copy_chunk(self, atom, source, target, bars, policy, part, chunk):
        slot = chunk % self.ring
        cute.copy(
            atom,
            source[None, part * self.chunks + chunk],
            target[None, slot],
            tma_bar_ptr=bars + slot,
            cache_policy=policy,
        )

    @cute.jit
    def load_head_weights(self, arguments, own_row, head, warp, lane):
        """Of the rows that this lane finishes, one per pass."""
        column = first_head(arguments) + head
        last = arguments.batch - 1
        rows = [own_row + self.finished_row(p, warp, lane) for p in range(self.passes)]
        return [load_head_weight(arguments, cutlass.min(row, last), column) for row in rows]

    def local_row(self, p, part, rows, warp):
        """Pass `p` of this warp: (index among its CTA's rows, finishing CTA, its first row, how
        many rows it has)."""
        own_row, peer_row, own, others = rows
        if WARPS * p < self.tile // 2:
            return WARPS * p + warp, part, own_row, own
        return WARPS * p - self.tile // 2 + warp, part ^ 1, peer_row, others

    def load_rows(self, arguments, part, rows, warp, lane):
        """This CTA's half of K of the tile's rows, one row per warp and pass: packed words
        [pass][piece][4]."""
        x = []
        for p in range(self.tile // WARPS):
            local, _, first, count = self.local_row(p, part, rows, warp)
            source = arguments.projected + Int64(first + local) * arguments.projected_pitch
            source = source + part * (2 * self.half_k) + lane * 16
            x.append(
                [
                    ptx.load_global_16b_if(
                        source + 512 * i, Int32((local < count) & self.in_half(lane + 32 * i, i))
                    )
                    for i in range(self.pieces)
                ]
            )
        return x

    def in_half(self, column, piece):
        """Whether a group of 8 columns lies in this half of K: always, but in the last piece of K =
        1280."""
        return True if (piece + 1) * 256 <= self.half_k else column < self.half_k // 8

    @cute.jit
    def reciprocal_norms(self, arguments, shared, x, part, rows, warp, lane):
        """rsqrt(mean square + eps) of each pass's row, from this CTA's half of K and the peer's."""
        half, squares, bar_squares = self.tile // 2, shared["squares"], shared["bar_squares"]
        for p in cutlass.range_constexpr(self.tile // WARPS):
            local, owner, _, count = self.local_row(p, part, rows, warp)
            total = Float32(0)
            for piece in x[p]:
                for word in piece:
                    total = arithmetic.sum_squares(word, total)
            total = lane_sum(total)
            if (lane < CLUSTER) & (
                local < count
            ):  # to both CTAs: squares[half of K][finishing CTA][row]
                slot = squares + ((part * CLUSTER + owner) * half + local) * 4
                ptx.store_cluster_async(
                    ptx.peer_address(slot, lane),
                    arithmetic.bits(total),
                    ptx.peer_address(bar_squares, lane),
                )
        cute.arch.barrier_arrive(barrier_id=BARRIER_ROWS_LANDED, number_of_threads=THREADS)
        ptx.mbarrier_wait(bar_squares, 0, "cluster")
        norms = []
        for p in cutlass.range_constexpr(self.tile // WARPS):
            local, owner, _, _ = self.local_row(p, part, rows, warp)
            slot = squares + (owner * half + local) * 4
            total = ptx.load_shared_f32(slot) + ptx.load_shared_f32(slot + CLUSTER * half * 4)
            norms.append(arithmetic.reciprocal_sqrt(total * Float32(1 / self.k) + arguments.eps))
        return norms

    @cute.jit
    def store_normalised(self, shared, x, norms, warp, lane, first, last):
        """bf16((x * rr) * gamma) of pieces `first` to `last` - 1 into y, swizzled, ready for
        wgmma."""
        for i in cutlass.range_constexpr(first, last):
            column = lane + 32 * i  # in groups of 8
            gamma = ptx.load_shared_16b(shared["gamma"] + column * 16)
            target = shared["y"] + (column >> 3) * (self.tile * 128)
            for p in cutlass.range_constexpr(self.tile // WARPS):
                words = [arithmetic.norm_pair(x[p][i][e], gamma[e], norms[p]) for e in range(4)]
                row = WARPS * p + warp
                address = target + row * 128 + (((column & 7) ^ (row & 7)) << 4)
                if cutlass.const_expr((i + 1) * 256 <= self.half_k):
                    ptx.store_shared_16b(address, words)
                else:
                    if self.in_half(column, i):
                        ptx.store_shared_16b(address, words)
        ptx.fence_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_NORMALISED, number_of_threads=32 * WARPS)

    @cute.jit
    def multiply(self, accumulator, shared, warp, lane, first, last):
        """Starts chunks `first` to `last` - 1: accumulator[64 head rows of this warpgroup, tile] +=
        weights y^T.

        The last of them still runs on return.
        """
        weights = shared["weights"] + (warp >> 2) * (CHUNK_BYTES // 2)
        for chunk in cutlass.range_constexpr(first, last):
            slot = chunk % self.ring
            ptx.mbarrier_wait(shared["bars"] + 8 * slot, (chunk // self.ring) & 1)
            accumulator = arithmetic.wgmma_64xnx64(
                accumulator,
                arithmetic.swizzled_descriptor(weights + slot * self.slot_bytes),
                arithmetic.swizzled_descriptor(self.chunk_of_y(shared, chunk)),
                self.tile,
            )
            if cutlass.const_expr(chunk > 0):
                accumulator = arithmetic.wgmma_wait(accumulator, 1)  # the chunk before is done
                if cutlass.const_expr(chunk == self.reuse_chunk):  # noqa: SIM102
                    # Both CTAs may now write where the sums go in this one: wgmma_wait returned, so
                    # this warp's reads are done.
                    if lane < CLUSTER:
                        ptx.mbarrier_arrive_cluster(ptx.peer_address(shared["bar_free"], lane))
                if cutlass.const_expr(chunk - 1 + self.ring < self.chunks):  # noqa: SIM102
                    if lane == 0:
                        ptx.mbarrier_arrive(shared["bar_empty"] + 8 * ((chunk - 1) % self.ring))
        return accumulator

    def chunk_of_y(self, shared, chunk):
        return shared["y"] + chunk * (self.tile * 128)

    def sums(self, shared):
        """Where the partial sums lie, f32 [row][128]: the peer's of the own rows, and the own
        ones."""
        return shared["y"], shared["y"] + self.tile // 2 * 512

    @cute.jit
    def exchange(self, accumulator, shared, part, own, others, warp, lane):
        """Sends the sums of the peer's rows to it and puts the own ones beside what the peer sends:
        f32 [row][128]."""
        received, kept = self.sums(shared)
        bar_sums = shared["bar_sums"]
        group, quad = lane >> 2, lane & 3
        # Columns are swizzled by bits 1 and 2 of the row, so that neither side has bank conflicts.
        column = (warp * 16 + 2 * group) ^ (quad << 3)
        peer = ptx.peer_address(received, part ^ 1) + column * 4
        bar_peer = ptx.peer_address(bar_sums, part ^ 1)
        half = self.tile // 2
        # All warps of both CTAs are past `reuse_chunk`. A second round of the cluster barrier would
        # do, but racecheck and synccheck hang when a warp is a round ahead of the others.
        ptx.mbarrier_wait(shared["bar_free"], 0, "cluster")
        # The peer's rows first: they have the longer way.
        for n in cutlass.range_constexpr(half // 8):
            for h in cutlass.range_constexpr(2):
                row = 8 * n + 2 * quad + h
                i = 4 * (n + half // 8) + h
                if row < others:
                    ptx.store_cluster_async_f32x2(
                        peer + row * 512, accumulator[i], accumulator[i + 2], bar_peer
                    )
        for n in cutlass.range_constexpr(half // 8):
            for h in cutlass.range_constexpr(2):
                row = 8 * n + 2 * quad + h
                i = 4 * n + h
                ptx.store_shared_f32x2(
                    kept + row * 512 + column * 4, accumulator[i], accumulator[i + 2]
                )
        cute.arch.barrier(barrier_id=BARRIER_NORMALISED, number_of_threads=32 * WARPS)
        ptx.mbarrier_wait(bar_sums, 0, "cluster")

    @cute.jit
    def finish(self, arguments, shared, raw_weights, own_row, own, head, heads, warp, lane):
        """Adds both halves of K and quantises: `row_lanes` lanes per row, each with every
        `row_lanes`-th group of 4 columns, so that what a row needs once is not done by a whole
        warp."""
        received, kept = self.sums(shared)
        lanes, groups = self.row_lanes, 32 // self.row_lanes
        sub = lane % lanes
        words, amax = [], []  # of pass p: bf16 pairs of group i; per group, the largest magnitude
        for p in cutlass.range_constexpr(self.passes):  # rows past `own`: computed, not stored
            local = self.finished_row(p, warp, lane)
            offset = (local * 128 + ((4 * sub) ^ (((local >> 1) & 3) << 3))) * 4
            words.append([])
            amax.append([])
            for i in cutlass.range_constexpr(groups):
                theirs = ptx.load_shared_f32x4(received + offset + 16 * lanes * i)
                ours = ptx.load_shared_f32x4(kept + offset + 16 * lanes * i)
                total = [theirs[e] + ours[e] for e in range(4)]
                pairs = [
                    arithmetic.bf16_pair(total[0], total[1]),
                    arithmetic.bf16_pair(total[2], total[3]),
                ]
                words[p].append(pairs)
                amax[p].append(largest_of_pairs(pairs))
        if (arguments.flags & FLAG_MXFP4) != 0:
            scales = [fp4_group_scales(amax[p]) for p in range(self.passes)]
            for p in cutlass.range_constexpr(self.passes):
                local = self.finished_row(p, warp, lane)
                index = Int64(own_row + local) * heads + head
                codes = [
                    fp4_codes(widen_pairs(pairs), inverse, converts=False)
                    for pairs, (_, inverse) in zip(words[p], scales[p], strict=True)
                ]
                codes = gathered_codes(codes, lane)
                exponents = gathered_exponents([exponent for exponent, _ in scales[p]])
                if local < own:
                    byte = 64 // groups * (sub % groups) + 2 * groups * (sub // groups)
                    ptx.store_global_words(arguments.query + index * 64 + byte, codes)
                    if sub == 0:
                        ptx.store_global_u32(arguments.query_scale + index * 4, exponents)
                        store_weight(arguments, index, raw_weights[p], Float32(1))
        else:
            scales = [fp8_scale(row_max(amax[p], lanes)) for p in range(self.passes)]
            for p in cutlass.range_constexpr(self.passes):
                local = self.finished_row(p, warp, lane)
                index = Int64(own_row + local) * heads + head
                scale, inverse = scales[p]
                if local < own:
                    for i in cutlass.range_constexpr(groups):
                        word = fp8_word(widen_pairs(words[p][i]), inverse)
                        column = 4 * sub + 4 * lanes * i
                        ptx.store_global_u32(arguments.query + index * 128 + column, word)
                    if sub == 0:
                        store_weight(arguments, index, raw_weights[p], arithmetic.float_of(scale))

    def finished_row(self, p, warp, lane):
        """The row, of the CTA's own, that this lane finishes in pass `p`."""
        rows = 32 // self.row_lanes  # of a warp
        return (WARPS * p + warp) * rows + lane // self.row_lanes


def largest_of_pairs(pairs):
    """The largest magnitude of four packed bf16, as 16 bits."""
    both = arithmetic.max_u16x2(pairs[0] & Uint32(MAGNITUDES), pairs[1] & Uint32(MAGNITUDES))
    return arithmetic.max_u32(both & Uint32(0xFFFF), both >> 16)


def widen_pairs(pairs):
    """The four fp32 values of two packed pairs."""
    return [
        arithmetic.float_of(word)
        for pair in pairs
        for word in (pair << 16, pair & Uint32(0xFFFF0000))
    ]


def row_max(maxima, lanes):
    """Bits of the amplitude of a row that `lanes` lanes hold, at least the floor."""
    top = maxima[0]
    for other in maxima[1:]:
        top = arithmetic.max_u32(top, other)
    top = lane_max(top, (1, 2, 4, 8)[: lanes.bit_length() - 1])
    return arithmetic.max_u32(top << 16, Uint32(FP8_QUERY_FLOOR))


def fp4_group_scales(maxima):
    """fp4_scale of each of the groups that 8 lanes hold; two groups share a shuffle."""
    scales = []
    for low, high in zip(maxima[::2], maxima[1::2], strict=True):
        both = lane_max(low | (high << 16), (1, 2, 4), arithmetic.max_u16x2)
        scales += [fp4_scale(both << 16), fp4_scale(both & Uint32(0xFFFF0000))]
    return scales


def gathered_codes(codes, lane):
    """From `codes[i]`, 16 bits for every i = 0 .. n - 1 in each of n = 2 or 4 neighbouring lanes:
    those of i = this lane's number among them, in the order of the lanes, as n / 2 words.

    Stored one by one, 8 lanes would write half a sector of memory at a time."""
    odd = lane & 1
    swap = 0x5410 - odd * (0x5410 - 0x3276)  # low halves, or the high ones in the other order
    halves = []
    for low, high in zip(codes[::2], codes[1::2], strict=True):
        both = arithmetic.permute(low, high, 0x5410)
        halves.append(arithmetic.permute(both, cute.arch.shuffle_sync_bfly(both, 1), swap))
    if len(halves) == 1:
        return halves
    upper = (lane >> 1) & 1
    own = 0x3210 + upper * 0x4444  # the first word, or the second
    other = 0x7654 - upper * 0x4444
    theirs = cute.arch.shuffle_sync_bfly(arithmetic.permute(*halves, other), 2)
    return [arithmetic.permute(halves[0], theirs, own), arithmetic.permute(theirs, halves[1], own)]


def gathered_exponents(exponents):
    """The bytes of a row's four groups in one word, in the first of its lanes: this has all four,
    or the first and the third."""
    if len(exponents) == 4:
        low, high = (a | (b << 8) for a, b in zip(exponents[::2], exponents[1::2], strict=True))
        return low | (high << 16)
    both = exponents[0] | (exponents[1] << 16)
    return both | (cute.arch.shuffle_sync_bfly(both, 8) << 8)
