// The load floor: the grid, cluster and shared memory of a kernel for one head per cluster of 4 CTAs, which only brings
// the weights in, in the best form that was found: 8 contiguous copies of 12 KB per CTA.
extern "C" __global__ void __launch_bounds__(288, 2) floor_copy(const unsigned char* source, unsigned* sink) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ unsigned long long bar;
  const unsigned bytes = 12288, copies = 8;
  const unsigned bar_address = (unsigned)__cvta_generic_to_shared(&bar);
  const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar_address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar_address), "r"(bytes * copies));
    const unsigned char* mine = source + (unsigned long long)(blockIdx.y * 4 + blockIdx.x) * bytes * copies;
    for (unsigned i = 0; i < copies; ++i)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              target + i * bytes),
          "l"(mine + i * bytes), "r"(bytes), "r"(bar_address)
          : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra WAIT; }" ::"r"(
      bar_address) : "memory");
  if (sink && threadIdx.x == 999) *sink = shared[0];
}
