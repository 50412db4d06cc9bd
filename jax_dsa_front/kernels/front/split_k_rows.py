"""Second of two launches for the largest batches: `split_k.py` on rows that `row_norm.py` has
normalised.

The rows come by TMA through the same ring as the weights, which leaves room for tiles of 128: the
weights are then read once for 128 rows. Launched with programmatic stream serialization behind a
first launch without it: when this kernel begins, everything before the first launch has finished,
so all but the normalised rows may be read before `griddepcontrol_wait`. A tenth warp inserts the
keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint64
from cutlass.cute.nvgpu import cpasync

from .. import arithmetic, ptx
from ..cta import SharedMemory, shared_address
from .arguments import FrontArguments, chosen_layer
from .key import insert_key
from .split_k import CHUNK, CHUNK_BYTES, CLUSTER, SHARED_LIMIT, WARPS, SplitK

THREADS = 32 * (WARPS + 2)

# Weight chunks that are loaded before the first launch has finished. The rows of a chunk go right
# before its weights: three chunks of weights in front of the first rows made B = 256 take 4 % more.
EARLY_CHUNKS = 2


class SplitKRows(SplitK):
    """The kernel for one K and one tile of batch rows; tiles lie along grid y."""

    threads = THREADS

    def __init__(self, k, tile):
        self.k, self.tile = k, tile
        self.half_k = k // CLUSTER
        self.chunks = self.half_k // CHUNK
        self.slot_bytes = CHUNK_BYTES + tile * CHUNK * 2  # a chunk of weights, one of the rows
        self.ring = min(self.chunks, (SHARED_LIMIT - 2 * 8) // (self.slot_bytes + 2 * 8))
        # The sums take the slots behind those that the last chunks use.
        sums_slots = -(-tile * 512 // self.slot_bytes)
        self.sums_slot = self.chunks % self.ring
        self.reuse_chunk = self.chunks - self.ring + sums_slots
        assert self.sums_slot + sums_slots <= self.ring
        self.deal_finished_rows()
        self.shared = SharedMemory(
            {
                "weights": (self.ring * self.slot_bytes, 1024),
                # mbarriers: a full one per slot, sums, free, an empty one per slot
                "bars": ((2 * self.ring + 2) * 8, 8),
            }
        )
        self.check_ring()

    @cute.jit
    def __call__(self, arguments: FrontArguments, stream):
        atom, coordinates = self.weight_tiles(arguments)
        shape = (self.tile // 2, CHUNK)
        row_atom, row_coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(
                cute.make_ptr(BFloat16, arguments.rows, cute.AddressSpace.gmem, assumed_align=16),
                cute.make_layout((1 << 20, self.k), stride=(self.k, 1)),
            ),
            cute.make_composed_layout(
                cute.make_swizzle(3, 4, 3), 0, cute.make_layout(shape, stride=(CHUNK, 1))
            ),
            shape,
        )
        tiles = (arguments.batch + (self.tile - 1)) // self.tile
        self.kernel(atom, coordinates, row_atom, row_coordinates, arguments).launch(
            grid=(CLUSTER, tiles, 1),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        coordinates: cute.Tensor,
        row_atom: cute.CopyAtom,
        row_coordinates: cute.Tensor,
        arguments: FrontArguments,
    ):
        thread, _, _ = cute.arch.thread_idx()
        part, tile, head = cute.arch.block_idx()
        _, tiles, heads = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        own_row, peer_row, own, others = self.shares(arguments.batch, part, tile, tiles)
        pointers = self.shared.allocate()
        shared = {name: shared_address(pointer) for name, pointer in pointers.items()}
        shared["bar_sums"] = shared["bars"] + 8 * self.ring
        shared["bar_free"] = shared["bar_sums"] + 8
        shared["bar_empty"] = shared["bar_free"] + 8
        if warp == WARPS:
            with cute.arch.elect_one():
                cpasync.prefetch_descriptor(atom)
                cpasync.prefetch_descriptor(row_atom)
            layer, _ = chosen_layer(arguments)
            bars = cute.recast_ptr(pointers["bars"], dtype=Uint64)
            source, target = self.weight_copies(atom, coordinates, pointers, arguments, layer, head)
            rows = self.row_copies(row_atom, row_coordinates, pointers, (own_row, peer_row))
            policy = ptx.evict_first_policy()
            for chunk in cutlass.range_constexpr(EARLY_CHUNKS):
                self.open_slot(shared, chunk)
                self.copy_chunk(atom, source, target, bars, policy, part, chunk)
            ptx.cluster_arrive_relaxed()
            ptx.cluster_wait()  # warp 0 has initialised the other barriers
            cute.arch.griddepcontrol_wait()
            for chunk in cutlass.range_constexpr(self.ring):
                self.copy_rows(row_atom, rows, bars, part, chunk)
                if cutlass.const_expr(chunk >= EARLY_CHUNKS):
                    self.copy_chunk(atom, source, target, bars, policy, part, chunk)
            for chunk in cutlass.range_constexpr(self.ring, self.chunks):
                self.reopen_slot(shared, chunk)
                self.copy_chunk(atom, source, target, bars, policy, part, chunk)
                self.copy_rows(row_atom, rows, bars, part, chunk)
        elif warp == WARPS + 1:
            ptx.cluster_arrive_relaxed()
            ptx.cluster_wait()
            layer, inside = chosen_layer(arguments)
            cta = (head * tiles + tile) * CLUSTER + part
            for row in range(cta, arguments.batch, CLUSTER * tiles * heads):
                insert_key(arguments, row, layer, inside, lane)
        else:
            if warp == 0:
                self.initialise_barriers(shared, EARLY_CHUNKS, own)
            ptx.cluster_arrive_relaxed()
            raw_weights = self.load_head_weights(arguments, own_row, head, warp, lane)
            ptx.cluster_wait()  # both CTAs' barriers are initialised
            accumulator = [Float32(0)] * (self.tile // 2)
            accumulator = self.multiply(accumulator, shared, warp, lane, 0, self.chunks)
            accumulator = arithmetic.wgmma_wait(accumulator, 0)
            self.exchange(accumulator, shared, part, own, others, warp, lane)
            self.finish(arguments, shared, raw_weights, own_row, own, head, heads, warp, lane)

    def row_copies(self, atom, coordinates, pointers, first_rows):
        """(source by chunk, target by slot) of the own rows and of the peer's.

        Rows past a CTA's share are another's, or zeros past the batch: their columns of the product
        are never used.
        """
        half = self.tile // 2
        copies = []
        for i, first in enumerate(first_rows):
            pointer = pointers["weights"] + (CHUNK_BYTES + i * half * CHUNK * 2)
            target = cute.make_tensor(
                cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3), dtype=BFloat16),
                cute.make_layout((half, CHUNK, self.ring), stride=(CHUNK, 1, self.slot_bytes // 2)),
            )
            source = cute.local_tile(
                cute.domain_offset((first, 0), coordinates), (half, CHUNK), (0, None)
            )
            target, source = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(target, 0, 2),
                cute.group_modes(source, 0, 2),
            )
            copies.append((source, target))
        return copies

    def copy_rows(self, atom, copies, bars, part, chunk):
        slot = chunk % self.ring
        for source, target in copies:
            cute.copy(
                atom,
                source[None, part * self.chunks + chunk],
                target[None, slot],
                tma_bar_ptr=bars + slot,
            )

    def chunk_of_y(self, shared, chunk):
        return shared["weights"] + (chunk % self.ring) * self.slot_bytes + CHUNK_BYTES

    def sums(self, shared):
        """Where the partial sums lie, f32 [row][128]: the peer's of the own rows, and the own
        ones."""
        received = shared["weights"] + self.sums_slot * self.slot_bytes
        return received, received + self.tile // 2 * 512
