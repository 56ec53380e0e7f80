// What the CPU kernels share: vectors as wide as the machine's, and loops over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace carousel {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

typedef float Vec8 __attribute__((vector_size(32), aligned(4), may_alias));

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void Store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

// bfloat16 is the upper half of a float.
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2), may_alias));

inline Vec Load(const uint16_t* p) {
  IntVec bits = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), IntVec) << 16;
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline void Store(uint16_t* p, Vec v) {
  IntVec bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  bits = v == v ? bits : IntVec{} + 0x7FC0;
  *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(bits, HalfVec);
}

// a * b + c, rounded once where the machine can do that. By name, not left to the compiler, which is told to fuse
// nothing (-ffp-contract=off): tuned for some CPUs GCC would fuse in one loop and not in the next, and results would then
// depend on which of them computed a sum.
template <typename V>
inline V MultiplyAdd(V a, V b, V c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_fmadd_ps(a, b, c);
#endif
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) return _mm256_fmadd_ps(a, b, c);
#endif
#if defined(__FP_FAST_FMAF)
#if __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#else
  for (size_t i = 0; i < sizeof(V) / sizeof(float); i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);  // one instruction
  return c;
#endif
#endif
  return a * b + c;
}

template <typename V>
inline V MultiplyAdd(float a, V b, V c) {
  return MultiplyAdd(a - V{}, b, c);  // not V{} + a, which would make a zero of a negative one
}

// The first n numbers at p, and `rest` in the other lanes.
template <typename F>
inline Vec LoadSome(const F* p, int64_t n, float rest = 0) {
  if (n >= kLanes) return Load(p);
  F some[kLanes] = {};
  std::copy_n(p, n, some);
  Vec v = Load(some);
  for (int64_t lane = n; lane < kLanes; lane++) v[lane] = rest;
  return v;
}

// The first n lanes to p.
template <typename F>
inline void StoreSome(F* p, int64_t n, Vec v) {
  F some[kLanes];
  Store(some, v);
  std::copy_n(some, n, p);
}

// The sum of the lanes, by halves.
inline float Total(Vec v) {
  const auto halves = reinterpret_cast<const Vec8*>(&v);
  Vec8 sum = kLanes == 16 ? halves[0] + halves[1] : halves[0];
  sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
  sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
  return sum[0] + sum[1];
}

inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

// exp for x <= 0, to about an ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' expf). Below -87: 0.
inline Vec Exp(Vec x) {
  const Vec low = Vec{} - 87.0f;
  IntVec alive = x > low;
  x = alive ? x : low;
  Vec n = x * 1.44269504088896341f;
  const Vec round = Vec{} + 12582912.0f;  // 1.5 * 2^23
  n = (n + round) - round;
  x = MultiplyAdd(-0.693359375f, n, x);
  x = MultiplyAdd(2.12194440e-4f, n, x);
  Vec y = Vec{} + 1.9875691500e-4f;
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = MultiplyAdd(y, x, Vec{} + next);
  y = MultiplyAdd(y * x, x, x) + 1.0f;
  IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return alive ? y * scale : Vec{};
}

inline void Prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// Eight rows of eight floats, transposed. Strides are in floats.
inline void Transpose8(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  Vec8 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = *reinterpret_cast<const Vec8*>(in + i * in_stride);
  for (int i = 0; i < 4; i++) {
    b[2 * i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[2 * i + 1] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[i + j + 2] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    *reinterpret_cast<Vec8*>(out + i * out_stride) = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *reinterpret_cast<Vec8*>(out + (i + 4) * out_stride) =
        __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
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
  // The processor may be what the others wait for.
  while (progress->done.load(std::memory_order_acquire) < tasks) std::this_thread::yield();
}

// Runs f(0) .. f(rows - 1), here where the rows are few and narrow.
inline void ForRows(xla::ffi::ThreadPool& pool, int64_t rows, int64_t width, const std::function<void(int64_t)>& f) {
  constexpr int64_t kAlone = 1 << 15, kTask = 1 << 13;  // numbers
  const int64_t share = std::max<int64_t>(1, rows * width < kAlone ? rows : kTask / width);
  Parallel(pool, (rows + share - 1) / share, [&](int64_t task) {
    for (int64_t row = task * share; row < std::min(rows, (task + 1) * share); row++) f(row);
  });
}

}  // namespace carousel
