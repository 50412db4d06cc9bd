// Chooses the kernel for a batch and launches it.  No XLA types here.
#ifndef JAX_DSA_FRONT_FRONT_LAUNCH_H_
#define JAX_DSA_FRONT_FRONT_LAUNCH_H_

#include <cuda.h>

#include <string>

#include "front_params.h"
#include "kernel_table.h"

namespace jax_dsa_front {

// Enqueues one or two launches on `stream` and nothing else, so it may run while the stream is being captured.
// `wq_b_rows`: all rows that lie at params.wq_b, over all layers.  Returns a sentence on failure, else "".
std::string LaunchFront(const KernelSet& set, FrontParams& params, int32_t heads, int64_t wq_b_rows, CUstream stream);

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_FRONT_LAUNCH_H_
