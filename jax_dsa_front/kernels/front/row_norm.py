"""First of two launches for the largest batches: normalises the rows once.

One CTA per row, one warp per half of it. `split_k_rows.py` is the second launch. Normalising inside
it, as `split_k.py` does, would take as long as the products. The squares are added in the order of
`split_k.py`, so that a row's bytes are the same whether one launch or two serve it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import arithmetic, ptx
from ..cta import SharedMemory, lane_sum, shared_address
from .arguments import FrontArguments, chosen_layer

HALVES = 2


class RowNorm:
    """y = bf16((x * rr) * gamma) of all rows into `arguments.rows`, for one K."""

    cluster = 1
    threads = 32 * HALVES

    def __init__(self, k):
        self.k = k
        self.half_k = k // HALVES
        self.pieces = -(-self.half_k // 256)  # of 16 bytes per lane
        self.shared = SharedMemory({"squares": (HALVES * 4, 16)})

    @cute.jit
    def __call__(self, arguments: FrontArguments, stream):
        self.kernel(arguments).launch(
            grid=(arguments.batch, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: FrontArguments):
        # The second launch may begin now: it loads weights and waits before it reads the rows.
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        lane = thread & 31
        half = cute.arch.make_warp_uniform(thread >> 5)
        squares = shared_address(self.shared.allocate()["squares"])
        first = half * (2 * self.half_k) + lane * 16  # byte offset of this lane's first 8 columns
        source = arguments.projected + Int64(row) * arguments.projected_pitch + first
        # The last piece of K = 1280 is half a warp's.
        present = [Int32(lane + 32 * i < self.half_k // 8) for i in range(self.pieces)]
        x = [ptx.load_global_16b_if(source + 512 * i, present[i]) for i in range(self.pieces)]
        layer, _ = chosen_layer(arguments)
        source = arguments.q_norm + Int64(layer) * arguments.q_norm_layer_stride + first
        gamma = [ptx.load_global_16b_if(source + 512 * i, present[i]) for i in range(self.pieces)]

        total = Float32(0)
        for i in cutlass.range_constexpr(self.pieces):
            for word in x[i]:
                total = arithmetic.sum_squares(word, total)
        total = lane_sum(total)
        if lane == 0:
            ptx.store_shared_f32(squares + half * 4, total)
        cute.arch.sync_threads()
        total = ptx.load_shared_f32(squares) + ptx.load_shared_f32(squares + 4)
        rr = arithmetic.reciprocal_sqrt(total * Float32(1 / self.k) + arguments.eps)
        target = arguments.rows + Int64(row) * (2 * self.k) + first
        for i in cutlass.range_constexpr(self.pieces):
            words = [arithmetic.norm_pair(x[i][e], gamma[i][e], rr) for e in range(4)]
            if present[i] != 0:
                ptx.store_global_16b(target + 512 * i, words)
