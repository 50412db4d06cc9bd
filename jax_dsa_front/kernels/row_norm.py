"""First of two launches for the largest batches: normalises the rows once.

One CTA per row, 8 columns per thread. `split_k_rows.py` is the second launch. Normalising inside
it, as `split_k.py` does, would take as long as the products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from . import ptx
from .common import FrontArguments, SharedMemory, chosen_layer, shared_address


class RowNorm:
    """y = bf16((x * rr) * gamma) of all rows into `arguments.rows`, for one K."""

    cluster = 1
    tile = 1

    def __init__(self, k):
        self.k = k
        self.warps = k // 256
        self.threads = 32 * self.warps
        self.shared = SharedMemory({"squares": (self.warps * 4, 16)})

    @cute.jit
    def __call__(self, arguments: FrontArguments, stream):
        self.kernel(arguments).launch(
            grid=(arguments.batch, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: FrontArguments):
        # The second launch may begin now: it loads weights and waits before it reads the rows.
        ptx.grid_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        squares = shared_address(self.shared.allocate()["squares"])
        layer, _ = chosen_layer(arguments)
        column = thread * 16
        x = ptx.load_global_16b(
            arguments.projected + Int64(row) * arguments.projected_pitch + column
        )
        gamma = ptx.load_global_16b(
            arguments.q_norm + Int64(layer) * arguments.q_norm_layer_stride + column
        )
        total = Float32(0)
        for word in x:
            total = ptx.sum_squares(word, total)
        for distance in (16, 8, 4, 2, 1):
            total = ptx.lane_add(total, distance)
        if lane == 0:
            ptx.store_shared_f32(squares + warp * 4, total)
        cute.arch.sync_threads()
        total = Float32(0)
        for i in cutlass.range_constexpr(self.warps):
            total = total + ptx.load_shared_f32(squares + i * 4)
        rr = ptx.reciprocal_sqrt(total * Float32(1 / self.k) + arguments.eps)
        words = [ptx.norm_pair(x[i], gamma[i], rr) for i in range(4)]
        ptx.store_global_16b(arguments.rows + Int64(row) * (2 * self.k) + column, words)
