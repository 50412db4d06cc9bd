// The process-wide table of loaded kernels.  Python (jax_dsa_front/_loader.py) loads and publishes, handlers look up.
#ifndef JAX_DSA_FRONT_KERNEL_TABLE_H_
#define JAX_DSA_FRONT_KERNEL_TABLE_H_

#include <cuda.h>

#include <cstdint>
#include <string>

namespace jax_dsa_front {

// How a kernel is launched; mirrored by `SCHEDULES` in _loader.py. See kernels/ for what they do.
enum Schedule : int32_t {
  kSplitN = 0,      // grid (cluster, heads, tiles)
  kSplitK = 1,      // grid (cluster, tiles, heads), a tensor map of wq_b first
  kSplitKRows = 2,  // the same with a second tensor map of the rows, behind a launch of kRowNorm
  kRowNorm = 3,     // grid (batch); never on its own
};

// Mirrored by `_Kernel` in _loader.py.
struct Kernel {
  CUkernel handle;
  int32_t schedule;
  int32_t tile;               // batch rows per cluster
  int32_t max_batch;          // not used above it; 0: no limit
  int32_t threads;
  int32_t cluster;
  int32_t shared_bytes;
  int32_t clusters_per_wave;  // how many clusters the device holds at once
};

// The kernels of one device and one K, in order of preference, a kRowNorm behind those that need it; immutable once
// published, never freed.
struct KernelSet {
  int32_t k;
  int32_t count;
  const Kernel* kernels;
  const KernelSet* next;
};

struct Driver {
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**);  // cuLaunchKernelEx
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  decltype(&cuGetErrorName) error_name;
};

// Null until published; one atomic load where the first K of the device is asked for.
const KernelSet* FindKernels(int32_t device, int32_t k);

// Like FindKernels, but asks Python to load them; fills `error` with a sentence where that fails.
const KernelSet* LoadKernels(int32_t device, int32_t k, std::string* error);

// Valid once any kernel has been published.
const Driver& LoadedDriver();

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_KERNEL_TABLE_H_
