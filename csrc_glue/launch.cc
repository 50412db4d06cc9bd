#include "launch.h"

namespace jax_dsa_front {

CUresult LaunchKernel(const Kernel& kernel, Grid grid, void** arguments, CUstream stream, bool overlap_previous) {
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (kernel.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = kernel.cluster;
    attribute.value.clusterDim.y = 1;
    attribute.value.clusterDim.z = 1;
  }
  if (overlap_previous) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  CUlaunchConfig config{};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = kernel.threads;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_bytes;
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  // A CUkernel stands for the function in the stream's own context.
  return LoadedDriver().launch(&config, reinterpret_cast<CUfunction>(kernel.handle), arguments, nullptr);
}

std::string DriverError(CUresult status, const char* call) {
  const char* name = nullptr;
  LoadedDriver().error_name(status, &name);
  return std::string(call) + " failed: " + (name != nullptr ? name : std::to_string(status));
}

}  // namespace jax_dsa_front
