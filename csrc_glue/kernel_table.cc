#include "kernel_table.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>

namespace jax_dsa_front {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kMessageBytes = 1024;

// Python's loader: 0, or 1 with a sentence in `message`.
using Loader = int32_t (*)(int32_t device, int32_t which, int64_t key, char* message, int32_t message_bytes);

std::array<std::array<std::atomic<const KernelSet*>, kOperators>, kMaxDevices> g_sets{};
std::mutex g_mutex;  // guards everything below
std::condition_variable g_idle;
Loader g_loader = nullptr;
bool g_closed = false;
int g_loading = 0;
Driver g_driver{};

}  // namespace

const KernelSet* FindKernels(int32_t device, Operator which, int64_t key) {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  const KernelSet* set = g_sets[device][which].load(std::memory_order_acquire);
  while (set != nullptr && set->key != key) set = set->next;
  return set;
}

const KernelSet* LoadKernels(int32_t device, Operator which, int64_t key, std::string* error) {
  Loader loader;
  {
    // The loader runs without the mutex: it takes Python's lock, whose holder may be waiting for ours.
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_closed || g_loader == nullptr) {
      *error = g_closed ? "jax_dsa_front cannot load its kernels: the Python interpreter is shutting down"
                        : "jax_dsa_front cannot load its kernels: import jax_dsa_front in this process first";
      return nullptr;
    }
    if (device < 0 || device >= kMaxDevices) {
      *error = "jax_dsa_front supports device ordinals below 64, got " + std::to_string(device);
      return nullptr;
    }
    loader = g_loader;
    ++g_loading;
  }
  char message[kMessageBytes] = "";
  const int32_t failed = loader(device, which, key, message, kMessageBytes);
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    --g_loading;
    g_idle.notify_all();  // inside the lock: after it, Close may return and the process end
  }
  const KernelSet* set = FindKernels(device, which, key);
  if (failed || set == nullptr) {
    message[kMessageBytes - 1] = 0;
    *error = message[0] ? message : "jax_dsa_front could not load its kernels";
    return nullptr;
  }
  return set;
}

const Driver& LoadedDriver() { return g_driver; }

}  // namespace jax_dsa_front

// The C interface for _runtime/loader.py ----------------------------------------------------------------------------------

using jax_dsa_front::Kernel;
using jax_dsa_front::KernelSet;

#define JAX_DSA_FRONT_EXPORT extern "C" __attribute__((visibility("default")))

JAX_DSA_FRONT_EXPORT void JaxDsaFrontSetLoader(void* loader) {
  std::lock_guard<std::mutex> lock(jax_dsa_front::g_mutex);
  jax_dsa_front::g_loader = reinterpret_cast<jax_dsa_front::Loader>(loader);
}

// Makes an operator's kernels of one key visible to every handler.  The driver's entry points are the same in every call.
JAX_DSA_FRONT_EXPORT void JaxDsaFrontPublish(int32_t device, int32_t which, int64_t key, const Kernel* kernels,
                                             int32_t count, void* launch, void* encode_tiled, void* error_name) {
  std::lock_guard<std::mutex> lock(jax_dsa_front::g_mutex);
  if (jax_dsa_front::FindKernels(device, jax_dsa_front::Operator(which), key) != nullptr) return;
  auto& driver = jax_dsa_front::g_driver;
  if (driver.launch == nullptr) {
    driver.encode_tiled = reinterpret_cast<decltype(driver.encode_tiled)>(encode_tiled);
    driver.error_name = reinterpret_cast<decltype(driver.error_name)>(error_name);
    driver.launch = reinterpret_cast<decltype(driver.launch)>(launch);
  }
  auto* copy = new Kernel[count];
  std::memcpy(copy, kernels, sizeof(Kernel) * count);
  auto& head = jax_dsa_front::g_sets[device][which];
  head.store(new KernelSet{key, count, copy, head.load(std::memory_order_relaxed)}, std::memory_order_release);
}

// From here on nothing calls into Python; returns when no call is under way.  Called at interpreter exit, without
// Python's lock (ctypes releases it), so that a loader that waits for the lock can finish.
JAX_DSA_FRONT_EXPORT void JaxDsaFrontClose() {
  std::unique_lock<std::mutex> lock(jax_dsa_front::g_mutex);
  jax_dsa_front::g_closed = true;
  jax_dsa_front::g_idle.wait(lock, [] { return jax_dsa_front::g_loading == 0; });
}
