// y = x @ w.T for few rows of x, as an XLA custom call: w is read once, at the memory's speed.
//
// Rows of x are the lanes: x is transposed first, and each weight multiplies a vector of rows. A result is one sum in
// the order of the inputs, so it does not depend on how many rows there are or where its own is.

#include <vector>

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of rows at a time, at most
constexpr int kSums = kLanes == 16 ? 24 : 12;   // accumulators: what the registers hold besides operands
constexpr int kShare = 48;                      // outputs: whole tiles of 12, 8 and 6

// kOut outputs times V vectors of rows. xs: [inputs, stride], y: [rows, outputs] from row and output of the tile on.
template <int V, int kOut>
inline void Tile(const float* xs, int64_t stride, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs) {
  Vec sum[kOut][V] = {};
  for (int64_t i = 0; i < inputs; i++) {
    if (i % 16 == 0)  // the weights that follow, a cache line of each output at a time
      for (int o = 0; o < kOut; o++) __builtin_prefetch(w + (o + kOut) * inputs + i);
    Vec x[V];
    for (int v = 0; v < V; v++) x[v] = Load(xs + i * stride + v * kLanes);
    for (int o = 0; o < kOut; o++)
      for (int v = 0; v < V; v++) sum[o][v] += w[o * inputs + i] * x[v];
  }
  for (int v = 0; v < V; v++)
    for (int64_t r = v * kLanes; r < std::min<int64_t>(rows, (v + 1) * kLanes); r++)
      for (int o = 0; o < kOut; o++) y[r * outputs + o] = sum[o][v][r - v * kLanes];
}

// All of a task's outputs for up to V vectors of rows.
template <int V>
void Outputs(const float* xs, int64_t stride, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t count) {
  constexpr int kOut = V == 1 ? kSums / 2 : kSums / V;
  int64_t o = 0;
  for (; o + kOut <= count; o += kOut) Tile<V, kOut>(xs, stride, w + o * inputs, y + o, rows, inputs, outputs);
  for (; o < count; o++) Tile<V, 1>(xs, stride, w + o * inputs, y + o, rows, inputs, outputs);
}

template <int V = kVectors>
void UpTo(int64_t vectors, const float* xs, int64_t stride, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t count) {
  if (vectors >= V) return Outputs<V>(xs, stride, w, y, rows, inputs, outputs, count);
  if constexpr (V > 1) UpTo<V - 1>(vectors, xs, stride, w, y, rows, inputs, outputs, count);
}

// x [rows, inputs] as [inputs, stride], zeros in the lanes that no row has.
std::vector<float> Transposed(const float* x, int64_t rows, int64_t inputs, int64_t stride) {
  std::vector<float> xs(inputs * stride);
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    int64_t i = 0;
    for (; i + 8 <= inputs; i += 8) Transpose8(x + r * inputs + i, inputs, xs.data() + i * stride + r, stride);
    for (; i < inputs; i++)
      for (int64_t j = r; j < r + 8; j++) xs[i * stride + j] = x[j * inputs + i];
  }
  for (; r < rows; r++)
    for (int64_t i = 0; i < inputs; i++) xs[i * stride + r] = x[r * inputs + i];
  return xs;
}

ffi::Error FewRowsMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = w.dimensions()[0];
  const int64_t vectors = (rows + kLanes - 1) / kLanes, stride = vectors * kLanes;
  const std::vector<float> transposed = Transposed(x.typed_data(), rows, inputs, stride);
  const float *xs = transposed.data(), *ws = w.typed_data();
  float* ys = y->typed_data();
  // A few tasks a thread: enough to even out, few enough that most tiles have had their weights fetched ahead.
  const int64_t share = std::max<int64_t>(1, outputs / (pool.num_threads() * 3 * kShare)) * kShare;
  Parallel(pool, (outputs + share - 1) / share, [=](int64_t task) {
    const int64_t first = task * share, count = std::min(share, outputs - first);
    for (int64_t v = 0; v < vectors; v += kVectors) {
      const int64_t r = v * kLanes;
      UpTo(vectors - v, xs + r, stride, ws + first * inputs, ys + r * outputs + first, rows - r, inputs, outputs, count);
    }
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
