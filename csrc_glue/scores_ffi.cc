// The XLA FFI handler behind jax_dsa_front.index_scores: verifies what memory safety depends on, then launches.
#include <cuda.h>

#include <cstdint>
#include <string>

#include "kernel_table.h"
#include "operand_checks.h"
#include "scores_launch.h"
#include "scores_params.h"
#include "stacks.h"
#include "xla/ffi/api/ffi.h"

namespace jax_dsa_front {
namespace {

constexpr char kCall[] = "jax_dsa_front.index_scores";
constexpr int64_t kHeadDim = 128;

int64_t Extent(const ffi::AnyBuffer& buffer, size_t from_the_end) {
  const auto dims = buffer.dimensions();
  return dims.size() >= from_the_end ? dims[dims.size() - from_the_end] : 0;
}

// Of the operands as they came; Execute checks their shapes.
int64_t KeyOf(const ffi::AnyBuffer& query, const ffi::AnyBuffer& cache) {
  return ScoresKey(query.element_type() == ffi::U8, Extent(cache, 2), Extent(query, 2));
}

ffi::Error Initialize(int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer, ffi::AnyBuffer cache, ffi::RemainingArgs,
                      ffi::RemainingRets, ffi::Dictionary) {
  if (Extent(query, 3) == 0) return ffi::Error::Success();
  const int64_t key = KeyOf(query, cache);
  if (FindKernels(device, kIndexScores, key) != nullptr) return ffi::Error::Success();
  std::string error;
  if (LoadKernels(device, kIndexScores, key, &error) != nullptr) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
}

ffi::Error Execute(CUstream stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer weights, ffi::AnyBuffer cache,
                   ffi::AnyBuffer block_table, ffi::AnyBuffer context_lens, ffi::RemainingArgs more,
                   ffi::Result<ffi::AnyBuffer> scores, int32_t cache_format, int32_t layer, int32_t traced) {
  const bool mxfp4 = cache_format == kFormatMxfp4;
  Checker check(kCall);
  check.Require(cache_format >= kFormatFp8 && cache_format <= kFormatMxfp4, "unknown cache_format");
  check.Require(traced == 0 || traced == 1, "unknown traced operands");
  check.Require(more.size() == size_t(mxfp4) + size_t(traced), "operands must end with query_scale, for mxfp4 alone, and the traced layer");
  check.Require(query.dimensions().size() == 3 && block_table.dimensions().size() == 2,
                "query must have rank 3 and block_table rank 2");
  if (!check.ok()) return check.error();
  Stacks stacks;
  const Stack cache_stack = stacks.Of("cache", cache, 3, check);
  const Extents cache_dims = Tail(cache, cache_stack);
  check.Require(cache_dims.size() == 3, "cache must have shape ([L,] pages, page_size, bytes)");
  if (!check.ok()) return check.error();

  const int64_t batch = query.dimensions()[0], heads = query.dimensions()[1];
  const int64_t sequences = block_table.dimensions()[0], table_width = block_table.dimensions()[1];
  const int64_t pages = cache_dims[0], page_size = cache_dims[1], layers = stacks.layers();
  const bool table_64 = block_table.element_type() == ffi::S64, lengths_64 = context_lens.element_type() == ffi::S64;
  const bool weights_f32 = weights.element_type() == ffi::F32;
  check.Shape("query", query, mxfp4 ? ffi::U8 : ffi::F8E4M3FN, {batch, heads, mxfp4 ? kHeadDim / 2 : kHeadDim});
  check.Shape("weights", weights, weights_f32 ? ffi::F32 : ffi::BF16, {batch, heads});
  check.Require(cache.element_type() == ffi::U8 && cache_dims[2] == (mxfp4 ? 68 : 132),
                "cache must be u8 with rows of 132 bytes, or 68 for mxfp4");
  check.Shape("block_table", block_table, table_64 ? ffi::S64 : ffi::S32, {sequences, table_width});
  check.Shape("context_lens", context_lens, lengths_64 ? ffi::S64 : ffi::S32, {batch});
  check.Shape("scores", *scores, ffi::F32, {batch, table_width * page_size});
  check.Require(sequences > 0 ? batch % sequences == 0 : batch == 0, "block_table's rows must divide those of query");
  check.Require((layers == 0 && layer == 0) || (layer >= 0 && layer < layers), "layer must lie within the stack");
  check.Require(!traced || (layers > 0 && layer == 0), "a traced layer needs a stacked cache and no static one");
  constexpr int64_t kInt32Max = INT32_MAX;
  check.Require(batch * heads <= kInt32Max && pages < kInt32Max && table_width * page_size <= kInt32Max,
                "an extent exceeds 2**31");
  if (!check.ok()) return check.error();
  if (batch == 0 || table_width == 0) return ffi::Error::Success();

  // The copy engine reads them in 16-byte pieces.
  check.OperandAligned("query", query.untyped_data(), 16);
  check.OperandAligned("weights", weights.untyped_data(), 16);
  check.OperandAligned("cache", cache.untyped_data(), 16);
  check.ResultAligned("scores", scores->untyped_data(), 16);
  if (!check.ok()) return check.error();

  ScoresParams params{};
  params.block_table = block_table.untyped_data();
  params.context_lens = context_lens.untyped_data();
  params.flags = (table_64 ? kTable64 : 0) | (lengths_64 ? kLengths64 : 0) | (weights_f32 ? 0 : kWeightsBf16) |
                 (cache_format == kFormatMxfp8 ? kScoresMxfp8 : 0) | kFill;
  params.static_layer = layer;
  params.num_layers = layers > 0 ? layers : 1;
  params.pages = pages;
  params.table_width = table_width;
  params.rows_per_sequence = batch / sequences;
  params.batch = batch;
  params.weights = weights.untyped_data();
  params.scores = scores->untyped_data();
  params.query = query.untyped_data();
  params.cache = cache.untyped_data();
  if (mxfp4) {
    const auto scale = more.get<ffi::AnyBuffer>(0);
    check.Require(scale.has_value(), "query_scale cannot be decoded");
    if (check.ok()) check.Shape("query_scale", *scale, ffi::U32, {batch, heads});
    if (!check.ok()) return check.error();
    params.query_scale = scale->untyped_data();
  }
  if (traced) {
    const auto scalar = more.get<ffi::AnyBuffer>(mxfp4 ? 1 : 0);
    check.Require(scalar.has_value() && scalar->element_type() == ffi::S32 && scalar->element_count() == 1,
                  "a traced layer must be an i32 scalar");
    if (!check.ok()) return check.error();
    params.layer = scalar->untyped_data();
  }

  const KernelSet* set = FindKernels(device, kIndexScores, KeyOf(query, cache));
  if (set == nullptr) return ffi::Error::Internal(std::string(kCall) + ": executed before it was initialised");
  const std::string failure = LaunchScores(*set, params, heads, page_size, stream);
  return failure.empty() ? ffi::Error::Success() : ffi::Error::Internal(std::string(kCall) + ": " + failure);
}

}  // namespace
}  // namespace jax_dsa_front

#define JAX_DSA_FRONT_EXPORT extern "C" __attribute__((visibility("default")))

// With hidden visibility the macros below would drop their symbols.
JAX_DSA_FRONT_EXPORT XLA_FFI_Error* JaxDsaFrontIndexScoresInitialize(XLA_FFI_CallFrame*);
JAX_DSA_FRONT_EXPORT XLA_FFI_Error* JaxDsaFrontIndexScoresExecute(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxDsaFrontIndexScoresInitialize, jax_dsa_front::Initialize,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // weights
                                  .Arg<xla::ffi::AnyBuffer>()  // cache
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxDsaFrontIndexScoresExecute, jax_dsa_front::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // weights
                                  .Arg<xla::ffi::AnyBuffer>()  // cache
                                  .Arg<xla::ffi::AnyBuffer>()  // block_table
                                  .Arg<xla::ffi::AnyBuffer>()  // context_lens
                                  .RemainingArgs()             // query_scale (mxfp4), layer (traced)
                                  .Ret<xla::ffi::AnyBuffer>()  // scores
                                  .Attr<int32_t>("cache_format")
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("traced"),
                              // Only enqueues one kernel: XLA may record it into a CUDA graph.
                              {xla::ffi::Traits::kCmdBufferCompatible});
