// The scorer's floor: a plain coalesced read of the same bytes, eight 16-byte loads in flight per thread.
extern "C" __global__ void __launch_bounds__(512) floor_read(const uint4* source, unsigned long long count,
                                                             unsigned* sink) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned mixed = 0;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                   : "l"(source + i + k * step));
#pragma unroll
    for (int k = 0; k < 8; ++k) mixed ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < count; i += step) {
    const uint4 v = source[i];
    mixed ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (mixed == 0x12345) *sink = mixed;
}

// The SM clock: cycles and nanoseconds of 20 us of spinning.
extern "C" __global__ void clock_rate(unsigned long long* out) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  const long long cycles = clock64();
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < 20000);
  out[0] = clock64() - cycles;
  out[1] = now - begin;
}
