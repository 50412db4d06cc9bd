"""What the warps and lanes of a CTA share: named regions of memory, barriers, sums over lanes."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import arithmetic, ptx


class SharedMemory(NamedTuple):
    """Named regions of a CTA's dynamic shared memory as (bytes, alignment), in address order."""

    regions: dict[str, tuple[int, int]]

    def nbytes(self):
        end = 0
        for size, alignment in self.regions.values():
            end = -(-end // alignment) * alignment + size
        return end

    def allocate(self):
        """Pointers by name; called once, in the kernel."""
        allocator = cutlass.memory.SmemAllocator()
        return {name: allocator.allocate(*region) for name, region in self.regions.items()}


def shared_address(pointer):
    return Int32(pointer.toint())


@cute.jit
def open_barriers(barriers):
    """Initialises mbarriers that complete with their bytes, and expects these: pairs of (address,
    bytes). By one lane, because by several it would be a loop over them."""
    with cute.arch.elect_one():
        for bar, _ in barriers:
            ptx.mbarrier_init(bar, 1)
        ptx.mbarrier_init_fence()
    cute.arch.sync_warp()  # the assembler lets the whole warp initialise
    with cute.arch.elect_one():
        for bar, nbytes in barriers:
            ptx.mbarrier_expect(bar, nbytes)
    cute.arch.sync_warp()


def lane_sum(value, distances=(16, 8, 4, 2, 1)):
    """The sum over the lanes whose numbers differ in these bits, by default the whole warp."""
    for distance in distances:
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
    return value


def lane_max(value, distances, largest_of=arithmetic.max_u32):
    """The largest over the lanes whose numbers differ in these bits."""
    for distance in distances:
        value = largest_of(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value
