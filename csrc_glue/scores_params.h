// The scorers' parameters, in the order of ScoresArguments in jax_dsa_front/kernels/scores/arguments.py.
#ifndef JAX_DSA_FRONT_SCORES_PARAMS_H_
#define JAX_DSA_FRONT_SCORES_PARAMS_H_

#include <cstdint>

namespace jax_dsa_front {

enum ScoresFlags : int32_t {
  kTable64 = 1,
  kLengths64 = 2,
  kWeightsBf16 = 4,
  kScoresMxfp8 = 8,
  kFill = 16,  // -inf behind the last page of a row, too
  kKeepScores = 32,  // LaunchScores: the scores stay in L2
};

// Device addresses.  B = batch = sequences * rows_per_sequence, H = heads, N = table_width.
// The caller sets what is not marked; LaunchScores sets the rest.
struct ScoresParams {
  // What the first loads need, together: the kernel reads its parameters 64 bytes at a time, from a cold cache.
  const void* block_table;   // i32 or i64 [sequences, N]
  const void* context_lens;  // i32 or i64 [B]
  const void* layer;         // i32 scalar; null where static_layer is the layer
  int32_t flags;             // ScoresFlags
  int32_t static_layer;
  int32_t num_layers;  // 1 for a cache that is not stacked
  int32_t pages;       // of a layer
  int32_t table_width;
  int32_t rows_per_sequence;
  int32_t groups;               // LaunchScores
  int32_t groups_per_sequence;  // LaunchScores
  int32_t reciprocal;           // LaunchScores
  int32_t ctas_per_group;       // LaunchScores
  int32_t groups_with_more;     // LaunchScores

  int32_t entries;           // LaunchScores
  int32_t groups_per_entry;  // LaunchScores
  int32_t search_steps;      // LaunchScores
  int32_t batch;
  const void* weights;      // bf16 or f32 [B, H], 16-byte aligned
  void* scores;             // f32 [B, N * page_size], 16-byte aligned
  const void* query;        // e4m3fn [B, H, 128]; mxfp4: u8 [B, H, 64]; 16-byte aligned
  const void* query_scale;  // u32 [B, H]; mxfp4 only
  const void* cache;        // u8 [layers, pages, page_size * 132], or 68 for mxfp4; 16-byte aligned
};

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_SCORES_PARAMS_H_
