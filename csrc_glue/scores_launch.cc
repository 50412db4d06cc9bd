#include "scores_launch.h"

#include <algorithm>

#include "launch.h"

namespace jax_dsa_front {
namespace {

constexpr int32_t kMaxEntries = 1024;  // MAX_ENTRIES in kernels/scores/arguments.py
constexpr int32_t kHeadDim = 128;
// Up to a third of L2 holds the scores until the selection reads them. Stored without that, they went to memory in some
// processes and not in others: 71.7 us against 66.8 for 128 rows of 16k.
constexpr int64_t kMostKeptBytes = 16 << 20;

int64_t Ceil(int64_t value, int64_t step) { return (value + step - 1) / step; }

// The fewest reads of a page, and among those the narrowest product.
const Kernel& Choose(const KernelSet& set, int32_t rows_per_sequence) {
  const Kernel* best = nullptr;
  for (int32_t i = 0; i < set.count; ++i) {
    const Kernel& kernel = set.kernels[i];
    const int64_t reads = Ceil(rows_per_sequence, kernel.tile);
    const int64_t fewest = best != nullptr ? Ceil(rows_per_sequence, best->tile) : 0;
    if (best == nullptr || reads < fewest || (reads == fewest && kernel.tile < best->tile)) best = &kernel;
  }
  return *best;
}

// A page and its scales as rows of 128 bytes, one box each; layers are the fourth dimension. Codes of mxfp4 are read by
// threads, not by wgmma, and stay as they are.
CUresult EncodeKeys(const Driver& driver, const ScoresParams& p, int32_t page_size, bool is_mxfp4, CUtensorMap* map) {
  const cuuint64_t page_bytes = cuuint64_t(page_size) * (is_mxfp4 ? 68 : 132);
  const cuuint64_t extents[4] = {128, page_bytes / 128, cuuint64_t(p.pages), cuuint64_t(p.num_layers)};
  const cuuint64_t strides[3] = {128, page_bytes, page_bytes * p.pages};
  const cuuint32_t box[4] = {128, cuuint32_t(page_bytes / 128), 1, 1};
  const cuuint32_t unit[4] = {1, 1, 1, 1};
  return driver.encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(p.cache), extents, strides, box,
                             unit, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             is_mxfp4 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// The heads of all rows, in boxes of a group's; zeros behind the last.
CUresult EncodeQuery(const Driver& driver, const ScoresParams& p, int32_t heads, int32_t rows, CUtensorMap* map) {
  const cuuint64_t extents[2] = {kHeadDim, cuuint64_t(p.batch) * heads};
  const cuuint64_t strides[1] = {kHeadDim};
  const cuuint32_t box[2] = {kHeadDim, cuuint32_t(heads * rows)};
  const cuuint32_t unit[2] = {1, 1};
  return driver.encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(p.query), extents, strides, box,
                             unit, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// How groups are dealt to CTAs and to entries of the prefix sum: kernels/scores/paged.py has the other side.
void Deal(const Kernel& kernel, ScoresParams* p) {
  p->groups_per_sequence = Ceil(p->rows_per_sequence, kernel.tile);
  p->groups = p->batch / p->rows_per_sequence * p->groups_per_sequence;
  const int32_t spread = std::min(p->groups, kernel.clusters_per_wave);
  p->reciprocal = Ceil(1 << 20, spread);
  p->ctas_per_group = kernel.clusters_per_wave / spread;
  p->groups_with_more = kernel.clusters_per_wave % spread;
  p->groups_per_entry = Ceil(p->groups, kMaxEntries);
  p->entries = Ceil(p->groups, p->groups_per_entry);
  p->search_steps = 0;
  while ((1 << p->search_steps) < p->entries) ++p->search_steps;
}

CUresult Launch(const Kernel& kernel, CUtensorMap* keys, CUtensorMap* query, ScoresParams& p,
                CUstream stream) {
  void* arguments[] = {query, keys, &p.block_table, &p.context_lens, &p.layer, &p.flags, &p.static_layer, &p.num_layers,
                       &p.pages, &p.table_width, &p.rows_per_sequence, &p.groups, &p.groups_per_sequence, &p.reciprocal,
                       &p.ctas_per_group, &p.groups_with_more, &p.entries, &p.groups_per_entry, &p.search_steps,
                       &p.batch, &p.weights, &p.scores, &p.query, &p.query_scale, &p.cache};
  void** first = arguments + (kernel.schedule == kPagedFp4 ? 1 : 0);  // which has no tensor map of the query
  return LaunchKernel(kernel, {unsigned(kernel.clusters_per_wave), 1, 1}, first, stream, false);
}

}  // namespace

std::string LaunchScores(const KernelSet& set, ScoresParams& params, int32_t heads, int32_t page_size, CUstream stream) {
  const Driver& driver = LoadedDriver();
  if (params.batch == 0 || params.table_width == 0) return "";
  const Kernel& kernel = Choose(set, params.rows_per_sequence);
  if (int64_t{params.table_width} * page_size > INT32_MAX) {
    return "the scorer takes rows of fewer than 2**31 scores, got a block table of " +
           std::to_string(params.table_width) + " pages of " + std::to_string(page_size) + " tokens";
  }
  Deal(kernel, &params);
  params.flags &= ~kKeepScores;
  if (int64_t{params.batch} * params.table_width * page_size * 4 <= kMostKeptBytes) params.flags |= kKeepScores;
  const bool is_mxfp4 = kernel.schedule == kPagedFp4;
  CUtensorMap keys, query;
  CUresult status = EncodeKeys(driver, params, page_size, is_mxfp4, &keys);
  if (status == CUDA_SUCCESS && !is_mxfp4) status = EncodeQuery(driver, params, heads, kernel.tile, &query);
  if (status != CUDA_SUCCESS) return DriverError(status, "cuTensorMapEncodeTiled");
  status = Launch(kernel, &keys, &query, params, stream);
  return status == CUDA_SUCCESS ? "" : DriverError(status, "cuLaunchKernelEx");
}

}  // namespace jax_dsa_front

// The bare launch, for benchmarks/ and tests: the same choice of kernel and tensor maps as inside XLA, on a stream of the
// caller's.
extern "C" __attribute__((visibility("default"))) int32_t JaxDsaFrontIndexScoresLaunch(
    int32_t device, int32_t is_mxfp4, jax_dsa_front::ScoresParams* params, int32_t heads, int32_t page_size,
    CUstream stream, char* message, int32_t message_bytes) {
  using namespace jax_dsa_front;
  const int64_t key = ScoresKey(is_mxfp4 != 0, page_size, heads);
  return BareLaunch(device, kIndexScores, key, message, message_bytes, [&](const KernelSet& set) {
    return LaunchScores(set, *params, heads, page_size, stream);
  });
}
