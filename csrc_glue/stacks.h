// Operands that may carry a leading axis of layers.
#ifndef JAX_DSA_FRONT_STACKS_H_
#define JAX_DSA_FRONT_STACKS_H_

#include <cstdint>

#include "operand_checks.h"

namespace jax_dsa_front {

// A [layers, ...] operand when it has one dimension more than a single layer's.
struct Stack {
  int64_t layers = 0;  // 0: not stacked
  int64_t stride = 0;  // bytes from one layer to the next, or 0
};

class Stacks {
 public:
  // The operand's stack, checked to have as many layers as the others.
  Stack Of(const char* name, const ffi::AnyBuffer& buffer, size_t rank_of_layer, Checker& check) {
    const auto dims = buffer.dimensions();
    if (dims.size() != rank_of_layer + 1) return {};
    const int64_t layers = dims[0];
    check.Require(layers > 0 && (layers_ == 0 || layers_ == layers), name,
                  "must have as many layers as the other stacked operands");
    layers_ = layers;
    return {layers, layers > 0 ? int64_t(buffer.size_bytes()) / layers : 0};
  }
  int64_t layers() const { return layers_; }

 private:
  int64_t layers_ = 0;
};

// The extents of one layer.
inline Extents Tail(const ffi::AnyBuffer& buffer, const Stack& stack) {
  const Extents dims = buffer.dimensions();
  const size_t lead = stack.layers ? 1 : 0;
  return Extents(dims.begin() + lead, dims.size() - lead);
}

}  // namespace jax_dsa_front

#endif  // JAX_DSA_FRONT_STACKS_H_
