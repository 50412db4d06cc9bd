// Chooses the scorer for a call and launches it.  No XLA types here.
#ifndef JAX_DSA_FRONT_SCORES_LAUNCH_H_
#define JAX_DSA_FRONT_SCORES_LAUNCH_H_

#include <cuda.h>

#include <string>

#include "kernel_table.h"
#include "scores_params.h"

namespace jax_dsa_front {

// By what scorers are looked up; `scores_key` in jax_dsa_front/_runtime/variants.py is the same.
inline int64_t ScoresKey(bool is_mxfp4, int64_t page_size, int64_t heads) {
  return int64_t{is_mxfp4} << 48 | page_size << 16 | heads;
}

// Enqueues one launch on `stream` and nothing else, so it may run while the stream is being captured.
// `set` holds the kernels of the call's key.  Returns a sentence on failure, else "".
std::string LaunchScores(const KernelSet& set, ScoresParams& params, int32_t heads, int32_t page_size, CUstream stream);

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_SCORES_LAUNCH_H_
