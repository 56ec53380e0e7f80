// y = x @ w.T for few rows of x, as an XLA custom call: w is read once, at the memory's speed.
//
// A tile is kOut outputs times kRows rows: one accumulator each over the inputs, summed across its lanes at the end.
// A result's arithmetic does not depend on how many rows there are or where its own is.

#include <cstring>
#include <utility>

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

constexpr int kOut = 4;
constexpr int kRows = kLanes / kOut;

// Lane `i` of the result takes this lane of (a, b): the first or second half of each group of kGroup lanes.
template <int kGroup, bool kSecond>
constexpr int Lane(int i) {
  constexpr int kVector = kLanes / 2, kHalf = kGroup / 2;
  const int j = i % kVector;
  return i / kVector * kLanes + j / kHalf * kGroup + j % kHalf + (kSecond ? kHalf : 0);
}

template <int kGroup, int... i>
inline Vec Halve(Vec a, Vec b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, Lane<kGroup, false>(i)...) + __builtin_shufflevector(a, b, Lane<kGroup, true>(i)...);
}

// The sums across the lanes of kLanes vectors, one a lane, each as the same tree.
template <int kGroup = kLanes>
inline Vec Sums(const Vec* v) {
  if constexpr (kGroup == 1) {
    return v[0];
  } else {
    Vec half[kGroup / 2];
    for (int i = 0; i < kGroup / 2; i++) half[i] = Halve<kGroup>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, kLanes>());
    return Sums<kGroup / 2>(half);
  }
}

// R rows of x times kOut rows of w. With `fetch` the rows of w that follow are asked for.
template <int R>
inline void Tile(const float* w, const float* x, float* y, int64_t inputs, int64_t outputs, bool fetch) {
  Vec sum[kRows * kOut] = {};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    Vec weight[kOut];
    for (int o = 0; o < kOut; o++) {
      weight[o] = Load(w + o * inputs + i);
      if (fetch) __builtin_prefetch(w + (o + kOut) * inputs + i);
    }
    for (int r = 0; r < R; r++) {
      const Vec value = Load(x + r * inputs + i);
      for (int o = 0; o < kOut; o++) sum[r * kOut + o] += weight[o] * value;
    }
  }
  const Vec sums = Sums(sum);
  for (int r = 0; r < R; r++) std::memcpy(y + r * outputs, reinterpret_cast<const float*>(&sums) + r * kOut, kOut * sizeof(float));
}

template <int R>
inline void Rest(int64_t rows, const float* w, const float* x, float* y, int64_t inputs, int64_t outputs, bool fetch) {
  if (rows == R) return Tile<R>(w, x, y, inputs, outputs, fetch);
  if constexpr (R > 1) Rest<R - 1>(rows, w, x, y, inputs, outputs, fetch);
}

// x [rows, inputs], w [outputs, inputs]; inputs are whole vectors, outputs multiples of kOut.
ffi::Error FewRowsMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = w.dimensions()[0];
  if (inputs % kLanes || outputs % kOut) return ffi::Error::InvalidArgument("sizes are not whole vectors");
  const int64_t share = outputs > 8192 ? 256 : 32;  // outputs a task
  const float *xs = x.typed_data(), *ws = w.typed_data();
  float* ys = y->typed_data();
  Parallel(pool, (outputs + share - 1) / share, [=](int64_t task) {
    for (int64_t o = task * share; o < std::min(outputs, (task + 1) * share); o += kOut)
      for (int64_t r = 0; r < rows; r += kRows)
        Rest<kRows>(std::min<int64_t>(kRows, rows - r), ws + o * inputs, xs + r * inputs, ys + r * outputs + o, inputs, outputs, r == 0);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarouselFewRowsMatmul, FewRowsMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
