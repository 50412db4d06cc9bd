// The kernels' parameters, in the order of FrontArguments in jax_dsa_front/kernels/front/arguments.py.
#ifndef JAX_DSA_FRONT_FRONT_PARAMS_H_
#define JAX_DSA_FRONT_FRONT_PARAMS_H_

#include <cstdint>

namespace jax_dsa_front {

enum FrontFlags : int32_t {
  kSlots64 = 1,
  kHeadWeightsF32 = 2,
  kWeightsF32 = 4,
  kMxfp8 = 8,
  kMxfp4 = 16,
};

// Device addresses.  B = batch, H = heads of this call; pitches and strides are in bytes.
// The addresses come with every offset that the host knows already added: columns, and a static layer or head_start.
struct FrontParams {
  // What the first loads need, together: the kernel reads its parameters 64 bytes at a time, from a cold cache.
  const void* projected;     // bf16 [B, >= K], pitch projected_pitch
  const void* q_norm;        // bf16 [K]
  const void* wq_b;          // bf16 [H * 128, K]
  const void* layer;         // i32 scalar; null without a layer operand
  int32_t projected_pitch;
  int32_t batch;
  int32_t num_layers;
  int32_t flags;                 // FrontFlags
  int32_t q_norm_layer_stride;   // the strides are 0 for operands that are not stacked
  int32_t wq_b_layer_rows;       // rows from one layer to the next

  float eps;
  float key_eps;
  float weight_scale;
  int32_t head_weights_pitch;
  const void* head_weights;     // bf16 or f32 [B, H], pitch head_weights_pitch
  const void* head_start;       // i32 scalar; null without a head_start operand
  void* query;                  // e4m3fn [B, H, 128]; mxfp4: u8 [B, H, 64]
  void* query_scale;            // u32 [B, H]; mxfp4 only
  void* weights;                // bf16 or f32 [B, H]
  const void* key;              // bf16 [B, 128], pitch key_pitch
  const void* key_norm_weight;  // f32 [128]
  const void* key_norm_bias;    // f32 [128]
  void* cache;                  // u8 [pages, page_size, 132], or 68 for mxfp4
  const void* slots;            // i32 or i64 [B]
  int64_t num_slots;            // pages * page_size
  int64_t cache_layer_stride;
  int32_t key_pitch;
  int32_t page_size;
  int32_t key_norm_weight_layer_stride;
  int32_t key_norm_bias_layer_stride;
  void* rows;                   // scratch: bf16 [B, K]
  int32_t head_start_limit;     // largest valid head_start
};

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_FRONT_PARAMS_H_
