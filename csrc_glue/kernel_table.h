// The process-wide table of loaded kernels, by operator and key.  Python (jax_dsa_front/_runtime/loader.py) loads and
// publishes, handlers look up.
#ifndef JAX_DSA_FRONT_KERNEL_TABLE_H_
#define JAX_DSA_FRONT_KERNEL_TABLE_H_

#include <cuda.h>

#include <cstdint>
#include <string>

namespace jax_dsa_front {

// Mirrored by `OPERATORS` in jax_dsa_front/_runtime/variants.py.
enum Operator : int32_t {
  kIndexFront = 0,   // key: K, the width of the query latent
  kIndexScores = 1,  // key: ScoresKey of scores_launch.h
  kOperators = 2,    // how many there are
};

// How a kernel of the front is launched; mirrored by `SCHEDULES` in loader.py. See kernels/front/ for what they do.
enum FrontSchedule : int32_t {
  kSplitN = 0,      // grid (cluster, heads, tiles)
  kSplitK = 1,      // grid (cluster, tiles, heads), a tensor map of wq_b first
  kSplitKRows = 2,  // the same with a second tensor map of the rows, behind a launch of kRowNorm
  kRowNorm = 3,     // grid (batch); never on its own
};

// Likewise of the scorers.
enum ScoresSchedule : int32_t {
  kPaged = 0,     // fp8, mxfp8; grid (clusters_per_wave), tensor maps of the query and of the keys first
  kPagedFp4 = 1,  // mxfp4; the same without the first tensor map
};

// Mirrored by `_Kernel` in loader.py.
struct Kernel {
  CUkernel handle;
  int32_t schedule;           // of its operator
  int32_t tile;               // batch rows per cluster; of a scorer, rows that share a read
  int32_t max_batch;          // not used above it; 0: no limit
  int32_t threads;
  int32_t cluster;
  int32_t shared_bytes;
  int32_t clusters_per_wave;  // how many clusters the device holds at once; without clusters, CTAs at one per SM
};

// An operator's kernels of one key on one device, in the order of jax_dsa_front/_runtime/variants.py; immutable once
// published, never freed.
struct KernelSet {
  int64_t key;
  int32_t count;
  const Kernel* kernels;
  const KernelSet* next;
};

struct Driver {
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**);  // cuLaunchKernelEx
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  decltype(&cuGetErrorName) error_name;
};

// Null until published; one atomic load where the operator's first key on the device is asked for.
const KernelSet* FindKernels(int32_t device, Operator which, int64_t key);

// Like FindKernels, but asks Python to load them; fills `error` with a sentence where that fails.
const KernelSet* LoadKernels(int32_t device, Operator which, int64_t key, std::string* error);

// Valid once any kernel has been published.
const Driver& LoadedDriver();

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_KERNEL_TABLE_H_
