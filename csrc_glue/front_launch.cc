#include "front_launch.h"

#include <initializer_list>
#include <vector>

#include "launch.h"

namespace jax_dsa_front {
namespace {

int64_t Tiles(const Kernel& kernel, int32_t batch) { return (int64_t{batch} + kernel.tile - 1) / kernel.tile; }

// The one for small batches up to its limit, whatever the number of heads: its sums have an order of their own, and a
// shard of the heads must give the bits that the whole gives. Above, where all add in one order, the first whose grid
// runs in one wave, else the last: a second wave costs more than a larger tile.
const Kernel& ChooseKernel(const KernelSet& set, int32_t batch, int32_t heads) {
  const Kernel* last = nullptr;
  for (int32_t i = 0; i < set.count; ++i) {
    const Kernel& kernel = set.kernels[i];
    if (kernel.schedule == kRowNorm) continue;
    if (kernel.max_batch != 0) {
      if (batch <= kernel.max_batch) return kernel;
      continue;
    }
    if (Tiles(kernel, batch) * heads <= kernel.clusters_per_wave) return kernel;
    last = &kernel;
  }
  return *last;
}

const Kernel* FindRowNorm(const KernelSet& set) {
  for (int32_t i = 0; i < set.count; ++i) {
    if (set.kernels[i].schedule == kRowNorm) return &set.kernels[i];
  }
  return nullptr;
}

// wq_b as bf16 [rows, k] in boxes of 64 columns and 128 rows.  Rows 16 c + 2 i + h are addressed as (i, h, c), so that
// row 2 i + h of a group of 16 lands in row 8 h + i: kernels/front/split_k.py says why.
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

// The normalised rows as bf16 [batch, k] in boxes of 64 columns and half a tile of rows, zeros past the batch.
CUresult EncodeRows(const Driver& driver, const FrontParams& params, int32_t k, int32_t tile, CUtensorMap* map) {
  const cuuint64_t extents[2] = {cuuint64_t(k), cuuint64_t(params.batch)};
  const cuuint64_t strides[1] = {cuuint64_t(k) * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(tile / 2)};
  const cuuint32_t unit[2] = {1, 1};
  return driver.encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, params.rows, extents, strides, box, unit,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// `maps` come before the members of `p` in the kernel's parameter list.
CUresult Launch(const Kernel& kernel, Grid grid, std::initializer_list<CUtensorMap*> maps, FrontParams& p,
                CUstream stream, bool overlap_previous) {
  const std::initializer_list<void*> members = {
      &p.projected, &p.q_norm, &p.wq_b, &p.layer, &p.projected_pitch, &p.batch, &p.num_layers, &p.flags,
      &p.q_norm_layer_stride, &p.wq_b_layer_rows, &p.eps, &p.key_eps, &p.weight_scale, &p.head_weights_pitch,
      &p.head_weights, &p.head_start, &p.query, &p.query_scale, &p.weights, &p.key, &p.key_norm_weight,
      &p.key_norm_bias, &p.cache, &p.slots, &p.num_slots, &p.cache_layer_stride, &p.key_pitch, &p.page_size,
      &p.key_norm_weight_layer_stride, &p.key_norm_bias_layer_stride, &p.rows, &p.head_start_limit};
  std::vector<void*> arguments;
  arguments.reserve(maps.size() + members.size());
  arguments.insert(arguments.end(), maps.begin(), maps.end());
  arguments.insert(arguments.end(), members.begin(), members.end());
  return LaunchKernel(kernel, grid, arguments.data(), stream, overlap_previous);
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
  const unsigned c = kernel.cluster, h = heads, t = tiles;
  CUresult status;
  if (kernel.schedule == kSplitN) {
    status = Launch(kernel, {c, h, t}, {}, params, stream, false);
    return status == CUDA_SUCCESS ? "" : DriverError(status, "cuLaunchKernelEx");
  }
  CUtensorMap weights_map, rows_map;
  status = EncodeWeights(driver, params, set.key, wq_b_rows, &weights_map);
  if (status == CUDA_SUCCESS && kernel.schedule == kSplitKRows) {
    status = EncodeRows(driver, params, set.key, kernel.tile, &rows_map);
  }
  if (status != CUDA_SUCCESS) return DriverError(status, "cuTensorMapEncodeTiled");
  if (kernel.schedule == kSplitK) {
    status = Launch(kernel, {c, t, h}, {&weights_map}, params, stream, false);
  } else {
    // The first launch waits for everything before it; the second may begin while the first runs, and nothing else can.
    const unsigned rows = params.batch;
    status = Launch(*FindRowNorm(set), {rows, 1, 1}, {}, params, stream, false);
    if (status == CUDA_SUCCESS) {
      status = Launch(kernel, {c, t, h}, {&weights_map, &rows_map}, params, stream, true);
    }
  }
  return status == CUDA_SUCCESS ? "" : DriverError(status, "cuLaunchKernelEx");
}

}  // namespace jax_dsa_front

// The bare launch, for benchmarks/ and tests/sanitize.py: the same choice of kernel and tensor map as inside XLA, on a
// stream of the caller's.
extern "C" __attribute__((visibility("default"))) int32_t JaxDsaFrontIndexFrontLaunch(
    int32_t device, int32_t k, jax_dsa_front::FrontParams* params, int32_t heads, int64_t wq_b_rows, CUstream stream,
    char* message, int32_t message_bytes) {
  using namespace jax_dsa_front;
  return BareLaunch(device, kIndexFront, k, message, message_bytes, [&](const KernelSet& set) {
    return LaunchFront(set, *params, heads, wq_b_rows, stream);
  });
}
