// One launch of a loaded kernel, and what the bare launches share.  No XLA types here.
#ifndef JAX_DSA_FRONT_LAUNCH_H_
#define JAX_DSA_FRONT_LAUNCH_H_

#include <cuda.h>

#include <cstring>
#include <string>

#include "kernel_table.h"

namespace jax_dsa_front {

struct Grid {
  unsigned x, y, z;
};

// `overlap_previous`: it may begin while the launch in front of it drains, and waits for that one itself
// (griddepcontrol.wait).  Only behind a launch of ours.
CUresult LaunchKernel(const Kernel& kernel, Grid grid, void** arguments, CUstream stream, bool overlap_previous);

// `call` failed: NAME_OF_THE_STATUS
std::string DriverError(CUresult status, const char* call);

// Finds or loads the kernels and calls `launch` with them, which returns a sentence on failure, else "".  0, or 1 with
// that sentence in `message`.
template <typename Launch>
int32_t BareLaunch(int32_t device, Operator which, int64_t key, char* message, int32_t message_bytes, Launch launch) {
  std::string error;
  const KernelSet* set = FindKernels(device, which, key);
  if (set == nullptr) set = LoadKernels(device, which, key, &error);
  if (set != nullptr) error = launch(*set);
  std::strncpy(message, error.c_str(), message_bytes - 1);
  message[message_bytes - 1] = 0;
  return error.empty() ? 0 : 1;
}

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_LAUNCH_H_
