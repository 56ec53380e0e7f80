// What the CPU kernels share: vectors as wide as the machine's, and loops over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace carousel {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void Store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

inline void Prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// Runs f(0) .. f(tasks - 1) on the pool and on this thread. Waits for tasks that have begun, never for one that the
// pool may not have started: that would deadlock when the pool's threads all wait so.
inline void Parallel(xla::ffi::ThreadPool& pool, int64_t tasks, const std::function<void(int64_t)>& f) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  // A helper that starts late finds no task left and does not touch f, which is gone by then.
  auto work = [progress, tasks, &f] {
    for (int64_t i; (i = progress->next.fetch_add(1)) < tasks;) {
      f(i);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(std::function<void()>(work));
  work();
  while (progress->done.load(std::memory_order_acquire) < tasks) {
  }
}

}  // namespace carousel
