#include "front_launch.h"

#include <cstring>

namespace jax_dsa_front {
namespace {

std::string DriverError(const Driver& driver, CUresult status, const char* call) {
  const char* name = nullptr;
  driver.error_name(status, &name);
  return std::string(call) + " failed: " + (name != nullptr ? name : std::to_string(status));
}

int64_t Tiles(const Kernel& kernel, int32_t batch) { return (int64_t{batch} + kernel.tile - 1) / kernel.tile; }

// The first kernel whose grid runs in one wave, else the last: a second wave costs more than a larger tile.
const Kernel& ChooseKernel(const KernelSet& set, int32_t batch, int32_t heads) {
  for (int32_t i = 0; i + 1 < set.count; ++i) {
    const Kernel& kernel = set.kernels[i];
    const bool in_range = kernel.max_batch == 0 || batch <= kernel.max_batch;
    if (in_range && Tiles(kernel, batch) * heads <= kernel.clusters_per_wave) return kernel;
  }
  return set.kernels[set.count - 1];
}

// wq_b as bf16 [rows, k] in boxes of 64 columns and 128 rows.  Rows 16 c + 2 i + h are addressed as (i, h, c), so that
// row 2 i + h of a group of 16 lands in row 8 h + i: kernels/split_k.py says why.
CUresult EncodeWeights(const Driver& driver, const FrontParams& params, int32_t k, int64_t rows, CUtensorMap* map) {
  const cuuint64_t row_bytes = cuuint64_t(k) * 2;
  const cuuint64_t extents[4] = {cuuint64_t(k), 8, 2, cuuint64_t(rows / 16)};
  const cuuint64_t strides[3] = {2 * row_bytes, row_bytes, 16 * row_bytes};
  const cuuint32_t box[4] = {64, 8, 2, 8};
  const cuuint32_t unit[4] = {1, 1, 1, 1};
  return driver.encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(params.wq_b), extents, strides,
                             box, unit, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace

std::string LaunchFront(const KernelSet& set, FrontParams& params, int32_t heads, int64_t wq_b_rows, CUstream stream) {
  const Driver& driver = LoadedDriver();
  const Kernel& kernel = ChooseKernel(set, params.batch, heads);
  const int64_t tiles = Tiles(kernel, params.batch);
  if (tiles > 65535 || heads > 65535) {
    return "the kernel takes at most 65535 heads and 65535 batch tiles of " + std::to_string(kernel.tile) + " rows, got " +
           std::to_string(heads) + " heads and a batch of " + std::to_string(params.batch);
  }

  alignas(64) CUtensorMap weights_map;
  void* arguments[32];
  int count = 0;
  CUlaunchConfig config{};
  config.gridDimX = kernel.cluster;
  if (kernel.needs_tensor_map) {
    const CUresult status = EncodeWeights(driver, params, set.k, wq_b_rows, &weights_map);
    if (status != CUDA_SUCCESS) return DriverError(driver, status, "cuTensorMapEncodeTiled");
    arguments[count++] = &weights_map;
    config.gridDimY = tiles;
    config.gridDimZ = heads;
  } else {
    config.gridDimY = heads;
    config.gridDimZ = tiles;
  }
  FrontParams& p = params;
  for (void* argument :
       {(void*)&p.projected, (void*)&p.q_norm, (void*)&p.wq_b, (void*)&p.layer, (void*)&p.projected_pitch,
        (void*)&p.batch, (void*)&p.num_layers, (void*)&p.flags, (void*)&p.q_norm_layer_stride,
        (void*)&p.wq_b_layer_rows, (void*)&p.eps, (void*)&p.key_eps, (void*)&p.weight_scale,
        (void*)&p.head_weights_pitch, (void*)&p.head_weights, (void*)&p.head_start, (void*)&p.query,
        (void*)&p.query_scale, (void*)&p.weights, (void*)&p.key, (void*)&p.key_norm_weight,
        (void*)&p.key_norm_bias, (void*)&p.cache, (void*)&p.slots, (void*)&p.num_slots,
        (void*)&p.cache_layer_stride, (void*)&p.key_pitch, (void*)&p.page_size,
        (void*)&p.key_norm_weight_layer_stride, (void*)&p.key_norm_bias_layer_stride,
        (void*)&p.head_start_limit}) {
    arguments[count++] = argument;
  }

  CUlaunchAttribute cluster{};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = kernel.cluster;
  cluster.value.clusterDim.y = 1;
  cluster.value.clusterDim.z = 1;
  config.blockDimX = kernel.threads;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_bytes;
  config.hStream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  // A CUkernel stands for the function in the stream's own context.
  const CUresult status = driver.launch(&config, reinterpret_cast<CUfunction>(kernel.handle), arguments, nullptr);
  return status == CUDA_SUCCESS ? "" : DriverError(driver, status, "cuLaunchKernelEx");
}

}  // namespace jax_dsa_front

// The bare launch, for benchmarks/: the same choice of kernel and tensor map as inside XLA, on a stream of the caller's.
extern "C" __attribute__((visibility("default"))) int32_t JaxDsaFrontLaunch(int32_t device, int32_t k,
                                                                            jax_dsa_front::FrontParams* params,
                                                                            int32_t heads, int64_t wq_b_rows,
                                                                            CUstream stream, char* message,
                                                                            int32_t message_bytes) {
  std::string error;
  const jax_dsa_front::KernelSet* set = jax_dsa_front::FindKernels(device, k);
  if (set == nullptr) set = jax_dsa_front::LoadKernels(device, k, &error);
  if (set != nullptr) error = jax_dsa_front::LaunchFront(*set, *params, heads, wq_b_rows, stream);
  std::strncpy(message, error.c_str(), message_bytes - 1);
  return error.empty() ? 0 : 1;
}
