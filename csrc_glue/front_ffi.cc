// The XLA FFI handler behind jax_dsa_front.index_front: verifies what memory safety depends on, then launches.
#include <cuda.h>

#include <cstdint>
#include <string>

#include "front_launch.h"
#include "front_params.h"
#include "kernel_table.h"
#include "operand_checks.h"
#include "stacks.h"
#include "xla/ffi/api/ffi.h"

namespace jax_dsa_front {
namespace {

constexpr char kCall[] = "jax_dsa_front.index_front";
constexpr int64_t kHeadDim = 128;

const void* Offset(const void* address, int64_t bytes) { return static_cast<const char*>(address) + bytes; }

int64_t QueryLatentWidth(const ffi::AnyBuffer& wq_b) {
  const auto dims = wq_b.dimensions();
  return dims.size() ? dims[dims.size() - 1] : 0;
}

ffi::Error Initialize(int32_t device, ffi::AnyBuffer projected, ffi::AnyBuffer, ffi::AnyBuffer wq_b, ffi::RemainingArgs,
                      ffi::RemainingRets, ffi::Dictionary) {
  const auto dims = projected.dimensions();
  if (dims.size() && dims[0] == 0) return ffi::Error::Success();
  const int64_t k = QueryLatentWidth(wq_b);
  if (FindKernels(device, kIndexFront, k) != nullptr) return ffi::Error::Success();
  std::string error;
  if (LoadKernels(device, kIndexFront, k, &error) != nullptr) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
}

ffi::Error Execute(CUstream stream, int32_t device, ffi::AnyBuffer projected, ffi::AnyBuffer q_norm, ffi::AnyBuffer wq_b,
                   ffi::AnyBuffer key_norm_weight, ffi::AnyBuffer key_norm_bias, ffi::AnyBuffer cache,
                   ffi::AnyBuffer slots, ffi::AnyBuffer key, ffi::AnyBuffer head_weights, ffi::RemainingArgs traced,
                   ffi::Result<ffi::AnyBuffer> query, ffi::Result<ffi::AnyBuffer> weights,
                   ffi::Result<ffi::AnyBuffer> cache_out, ffi::RemainingRets more, int32_t key_offset,
                   int32_t weight_offset, float eps, float key_eps, int32_t cache_format, float weight_scale,
                   int32_t num_heads, int32_t head_start, int32_t layer, int32_t traced_mask) {
  const bool mxfp4 = cache_format == kFormatMxfp4;
  Checker check(kCall);
  check.Require(cache_format >= kFormatFp8 && cache_format <= kFormatMxfp4, "unknown cache_format");
  check.Require(projected.dimensions().size() == 2 && key.dimensions().size() == 2 &&
                    head_weights.dimensions().size() == 2 && slots.dimensions().size() == 1,
                "projected, key and head_weights must have rank 2 and slots rank 1");
  check.Require(traced_mask >= 0 && traced_mask < 4, "unknown traced operands");
  check.Require(traced.size() == size_t((traced_mask & 1) + ((traced_mask >> 1) & 1)), "traced operands are missing");
  check.Require(more.size() == (mxfp4 ? 2 : 1), "results must end with query_scale, for mxfp4 alone, and the scratch");
  if (!check.ok()) return check.error();

  // Stacks and shapes
  Stacks stacks;
  const Stack q_norm_stack = stacks.Of("q_norm", q_norm, 1, check);
  const Stack wq_b_stack = stacks.Of("wq_b", wq_b, 2, check);
  const Stack gain_stack = stacks.Of("key_norm_weight", key_norm_weight, 1, check);
  const Stack bias_stack = stacks.Of("key_norm_bias", key_norm_bias, 1, check);
  const Stack cache_stack = stacks.Of("cache", cache, 3, check);
  const Extents wq_b_dims = Tail(wq_b, wq_b_stack);
  const Extents cache_dims = Tail(cache, cache_stack);
  check.Require(wq_b_dims.size() == 2 && wq_b_dims[0] % kHeadDim == 0, "wq_b must have shape ([L,] H * 128, K)");
  check.Require(cache_dims.size() == 3, "cache must have shape ([L,] pages, page_size, bytes)");
  if (!check.ok()) return check.error();
  const int64_t batch = projected.dimensions()[0], k = wq_b_dims[1], heads = wq_b_dims[0] / kHeadDim;
  const int64_t pages = cache_dims[0], page_size = cache_dims[1];
  const int64_t layers = stacks.layers();
  const bool slots_64 = slots.element_type() == ffi::S64;
  const bool head_weights_f32 = head_weights.element_type() == ffi::F32;
  const bool weights_f32 = weights->element_type() == ffi::F32;
  const int64_t p = projected.dimensions()[1], key_width = key.dimensions()[1], weight_width = head_weights.dimensions()[1];
  check.Shape("projected", projected, ffi::BF16, {batch, p});
  check.Shape("key", key, ffi::BF16, {batch, key_width});
  check.Shape("head_weights", head_weights, head_weights_f32 ? ffi::F32 : ffi::BF16, {batch, weight_width});
  check.Shape("slots", slots, slots_64 ? ffi::S64 : ffi::S32, {batch});
  check.Shape("weights", *weights, weights_f32 ? ffi::F32 : ffi::BF16, {batch, heads});
  check.Require(wq_b.element_type() == ffi::BF16 && q_norm.element_type() == ffi::BF16 &&
                    cache.element_type() == ffi::U8 && key_norm_weight.element_type() == ffi::F32 &&
                    key_norm_bias.element_type() == ffi::F32,
                "q_norm and wq_b must be bf16, key_norm_weight and key_norm_bias f32, cache u8");
  check.Require(Equal(Tail(q_norm, q_norm_stack), {k}), "q_norm must have shape ([L,] K)");
  check.Require(Equal(Tail(key_norm_weight, gain_stack), {kHeadDim}) &&
                    Equal(Tail(key_norm_bias, bias_stack), {kHeadDim}),
                "key_norm_weight and key_norm_bias must have shape ([L,] 128)");
  check.Require(cache_dims[2] == (mxfp4 ? 68 : 132), "cache rows must have 132 bytes, or 68 for mxfp4");
  auto scratch = more.get<ffi::AnyBuffer>(more.size() - 1);
  check.Require(scratch.has_value(), "the scratch cannot be decoded");
  if (check.ok()) check.Shape("scratch", **scratch, ffi::BF16, {batch, k});
  if (mxfp4) {
    check.Shape("query", *query, ffi::U8, {batch, heads, kHeadDim / 2});
    auto scale = more.get<ffi::AnyBuffer>(0);
    check.Require(scale.has_value(), "query_scale cannot be decoded");
    if (check.ok()) check.Shape("query_scale", **scale, ffi::U32, {batch, heads});
  } else {
    check.Shape("query", *query, ffi::F8E4M3FN, {batch, heads, kHeadDim});
  }

  // Columns, layers, heads
  check.Require(p >= k, "projected must be at least K wide");
  check.Require(key_offset >= 0 && key_offset + kHeadDim <= key_width, "key_offset + 128 must lie within key");
  check.Require(heads > 0 && num_heads >= heads && head_start >= 0 && head_start <= num_heads - heads,
                "head_start must lie between 0 and num_heads - H");
  const int64_t heads_read = (traced_mask & 2) ? num_heads : head_start + heads;  // traced: any shard's
  check.Require(weight_offset >= 0 && weight_offset + heads_read <= weight_width,
                "weight_offset + head_start + H must lie within head_weights");
  check.Require((layers == 0 && layer == 0) || (layer >= 0 && layer < layers), "layer must lie within the stack");
  check.Require(!(traced_mask & 1) || (layers > 0 && layer == 0), "a traced layer needs a stacked operand and no static one");
  check.Require(!(traced_mask & 2) || head_start == 0, "head_start is either traced or static");
  check.Require(cache.untyped_data() == cache_out->untyped_data(), "the cache must be aliased to its result");
  // The kernel's pitches and strides are 32-bit numbers of bytes.
  constexpr int64_t kInt32Max = INT32_MAX;
  check.Require(batch <= kInt32Max && page_size <= kInt32Max && p <= kInt32Max / 2 && key_width <= kInt32Max / 2 &&
                    weight_width <= kInt32Max / 4 && layers * wq_b_dims[0] <= kInt32Max,
                "an extent exceeds 2**31");
  if (!check.ok()) return check.error();
  if (batch == 0) return ffi::Error::Success();

  // Operands read in 16-byte pieces; their rows and layers are multiples of that by shape, but for projected's rows.
  check.Require(p % 8 == 0, "the kernel needs the width of projected to be a multiple of 8");
  check.OperandAligned("projected", projected.untyped_data(), 16);
  check.OperandAligned("q_norm", q_norm.untyped_data(), 16);
  check.OperandAligned("wq_b", wq_b.untyped_data(), 16);
  check.OperandAligned("key_norm_weight", key_norm_weight.untyped_data(), 16);
  check.OperandAligned("key_norm_bias", key_norm_bias.untyped_data(), 16);
  check.OperandAligned("cache", cache.untyped_data(), 4);
  check.ResultAligned("query", query->untyped_data(), 8);
  check.ResultAligned("scratch", (*scratch)->untyped_data(), 16);
  if (!check.ok()) return check.error();

  FrontParams params{};
  const int64_t head_weight_bytes = head_weights_f32 ? 4 : 2;
  params.projected = projected.untyped_data();
  params.q_norm = Offset(q_norm.untyped_data(), layer * q_norm_stack.stride);
  params.wq_b = Offset(wq_b.untyped_data(), layer * wq_b_stack.stride);
  params.key_norm_weight = Offset(key_norm_weight.untyped_data(), layer * gain_stack.stride);
  params.key_norm_bias = Offset(key_norm_bias.untyped_data(), layer * bias_stack.stride);
  params.cache = static_cast<char*>(cache_out->untyped_data()) + layer * cache_stack.stride;
  params.slots = slots.untyped_data();
  params.key = Offset(key.untyped_data(), key_offset * 2);
  params.head_weights = Offset(head_weights.untyped_data(), (int64_t{weight_offset} + head_start) * head_weight_bytes);
  params.query = query->untyped_data();
  params.weights = weights->untyped_data();
  if (mxfp4) params.query_scale = (*more.get<ffi::AnyBuffer>(0))->untyped_data();
  params.rows = (*scratch)->untyped_data();
  size_t next = 0;
  for (int bit = 0; bit < 2; ++bit) {
    if (!((traced_mask >> bit) & 1)) continue;
    const auto scalar = traced.get<ffi::AnyBuffer>(next++);
    check.Require(scalar.has_value() && scalar->element_type() == ffi::S32 && scalar->element_count() == 1,
                  "a traced layer or head_start must be an i32 scalar");
    if (!check.ok()) return check.error();
    (bit == 0 ? params.layer : params.head_start) = scalar->untyped_data();
  }
  params.num_slots = pages * page_size;
  params.cache_layer_stride = cache_stack.stride;
  params.projected_pitch = p * 2;
  params.key_pitch = key_width * 2;
  params.head_weights_pitch = weight_width * head_weight_bytes;
  params.page_size = page_size;
  params.q_norm_layer_stride = q_norm_stack.stride;
  params.key_norm_weight_layer_stride = gain_stack.stride;
  params.key_norm_bias_layer_stride = bias_stack.stride;
  params.wq_b_layer_rows = wq_b_stack.layers ? wq_b_dims[0] : 0;
  params.num_layers = layers;
  params.head_start_limit = num_heads - heads;
  params.batch = batch;
  params.flags = (slots_64 ? kSlots64 : 0) | (head_weights_f32 ? kHeadWeightsF32 : 0) | (weights_f32 ? kWeightsF32 : 0) |
                 (cache_format == kFormatMxfp8 ? kMxfp8 : 0) | (mxfp4 ? kMxfp4 : 0);
  params.eps = eps;
  params.key_eps = key_eps;
  params.weight_scale = weight_scale;

  const KernelSet* set = FindKernels(device, kIndexFront, k);
  if (set == nullptr) return ffi::Error::Internal(std::string(kCall) + ": executed before it was initialised");
  const int64_t rows_left = (wq_b_stack.layers ? wq_b_stack.layers - layer : 1) * wq_b_dims[0];
  const std::string failure = LaunchFront(*set, params, heads, rows_left, stream);
  return failure.empty() ? ffi::Error::Success() : ffi::Error::Internal(std::string(kCall) + ": " + failure);
}

}  // namespace
}  // namespace jax_dsa_front

#define JAX_DSA_FRONT_EXPORT extern "C" __attribute__((visibility("default")))

// The FFI version that these handlers speak: a runtime accepts its own minor version and older ones.
JAX_DSA_FRONT_EXPORT int32_t JaxDsaFrontFfiMinor() { return XLA_FFI_API_MINOR; }

// With hidden visibility the macros below would drop their symbols.
JAX_DSA_FRONT_EXPORT XLA_FFI_Error* JaxDsaFrontIndexFrontInitialize(XLA_FFI_CallFrame*);
JAX_DSA_FRONT_EXPORT XLA_FFI_Error* JaxDsaFrontIndexFrontExecute(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxDsaFrontIndexFrontInitialize, jax_dsa_front::Initialize,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // projected
                                  .Arg<xla::ffi::AnyBuffer>()  // q_norm
                                  .Arg<xla::ffi::AnyBuffer>()  // wq_b
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxDsaFrontIndexFrontExecute, jax_dsa_front::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // projected
                                  .Arg<xla::ffi::AnyBuffer>()  // q_norm
                                  .Arg<xla::ffi::AnyBuffer>()  // wq_b
                                  .Arg<xla::ffi::AnyBuffer>()  // key_norm_weight
                                  .Arg<xla::ffi::AnyBuffer>()  // key_norm_bias
                                  .Arg<xla::ffi::AnyBuffer>()  // cache
                                  .Arg<xla::ffi::AnyBuffer>()  // slots
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // head_weights
                                  .RemainingArgs()             // traced layer, traced head_start
                                  .Ret<xla::ffi::AnyBuffer>()  // query
                                  .Ret<xla::ffi::AnyBuffer>()  // weights
                                  .Ret<xla::ffi::AnyBuffer>()  // cache
                                  .RemainingRets()             // query_scale (mxfp4), scratch
                                  .Attr<int32_t>("key_offset")
                                  .Attr<int32_t>("weight_offset")
                                  .Attr<float>("eps")
                                  .Attr<float>("key_eps")
                                  .Attr<int32_t>("cache_format")
                                  .Attr<float>("weight_scale")
                                  .Attr<int32_t>("num_heads")
                                  .Attr<int32_t>("head_start")
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("traced"),
                              // Only enqueues one kernel or two: XLA may record it into a CUDA graph.
                              {xla::ffi::Traits::kCmdBufferCompatible});
