// Rules for a call's operands, and the message of the first that is violated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_dsa_front {

namespace ffi = xla::ffi;

using Extents = ffi::Span<const int64_t>;

// Attribute `cache_format`: the place in ROW_BYTES of jax_dsa_front/_cache.py.
enum CacheFormat : int32_t { kFormatFp8 = 0, kFormatMxfp8 = 1, kFormatMxfp4 = 2 };

inline bool Equal(Extents got, std::initializer_list<int64_t> expected) {
  return got.size() == expected.size() && std::equal(expected.begin(), expected.end(), got.begin());
}

inline std::string Listed(const int64_t* extents, size_t count) {
  std::string list;
  for (size_t i = 0; i < count; ++i) list += (i ? ", " : "") + std::to_string(extents[i]);
  return "(" + list + ")";
}

// Collects the first violated rule; later checks then do nothing. Messages are made of violations alone: made of every
// check, they took 5 us of each call.
class Checker {
 public:
  // `call` starts every message.
  explicit Checker(const char* call) : call_(call) {}
  template <typename Buffer>
  void Shape(const char* name, const Buffer& buffer, ffi::DataType dtype, std::initializer_list<int64_t> expected) {
    const Extents dims = buffer.dimensions();
    if (!ok() || (buffer.element_type() == dtype && Equal(dims, expected))) return;
    Fail(std::string(name) + " must have type " + std::to_string(int(dtype)) + " and shape " +
         Listed(expected.begin(), expected.size()) + ", got type " + std::to_string(int(buffer.element_type())) +
         " and shape " + Listed(dims.begin(), dims.size()));
  }
  void OperandAligned(const char* name, const void* address, uintptr_t bytes) {
    if (IsAligned(address, bytes)) return;
    Fail(std::string(name) + " must be aligned to " + std::to_string(bytes) +
         " bytes: XLA has passed a slice of an array where it lies; take the slice at another place, or call "
         "jax.lax.optimization_barrier on it");
  }
  void ResultAligned(const char* name, const void* address, uintptr_t bytes) {
    if (IsAligned(address, bytes)) return;
    Fail(std::string(name) + " must be aligned to " + std::to_string(bytes) +
         " bytes, as XLA's buffers are: please report this");
  }
  void Require(bool holds, const char* rule) {
    if (!holds) Fail(rule);
  }
  void Require(bool holds, const char* name, const char* rule) {
    if (!holds) Fail(std::string(name) + " " + rule);
  }
  bool ok() const { return error_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(error_); }

 private:
  static bool IsAligned(const void* address, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
  }
  void Fail(const std::string& rule) {
    if (ok()) error_ = std::string(call_) + ": " + rule;
  }

  const char* call_;
  std::string error_;
};

}  // namespace jax_dsa_front
