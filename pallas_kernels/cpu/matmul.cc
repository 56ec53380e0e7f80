// y = x @ w.T for any number of rows, as an XLA custom call.
//
// Rows of x are the lanes: x is first transposed into panels of a few vectors of rows, and each weight multiplies a
// vector of rows. Weights are read as they lie: with few rows once, at the memory's speed. A result is one sum in the
// order of the inputs, so it does not depend on how many rows there are or where its own is.

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of rows in a panel, at most
constexpr int kPanel = kVectors * kLanes;       // rows
constexpr int kSums = kLanes == 16 ? 24 : 12;   // accumulators: what the registers hold besides operands
constexpr int kGroup = 48;                      // outputs: whole tiles of 12, 8 and 6
constexpr int kPart = 128;                      // inputs that one task transposes

// out[j, i] = in[i, j] for n times m.
inline void Transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride, int64_t n, int64_t m) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    int64_t j = 0;
    for (; j + 8 <= m; j += 8) Transpose8(in + i * in_stride + j, in_stride, out + j * out_stride + i, out_stride);
    for (; j < m; j++)
      for (int64_t k = i; k < i + 8; k++) out[j * out_stride + k] = in[k * in_stride + j];
  }
  for (; i < n; i++)
    for (int64_t j = 0; j < m; j++) out[j * out_stride + i] = in[i * in_stride + j];
}

// kOut outputs of a panel of V vectors of rows. xs: [inputs, V * kLanes], sums: [kOut, V * kLanes].
template <int V, int kOut>
inline void Tile(const float* xs, const float* w, float* sums, int64_t inputs) {
  Vec sum[kOut][V] = {};
  for (int64_t i = 0; i < inputs; i++) {
    if (i % 16 == 0)  // the weights that follow, a cache line of each output at a time
      for (int o = 0; o < kOut; o++) __builtin_prefetch(w + (o + kOut) * inputs + i);
    Vec x[V];
    for (int v = 0; v < V; v++) x[v] = Load(xs + (i * V + v) * kLanes);
    for (int o = 0; o < kOut; o++)
      for (int v = 0; v < V; v++) sum[o][v] = MultiplyAdd(w[o * inputs + i], x[v], sum[o][v]);
  }
  for (int o = 0; o < kOut; o++)
    for (int v = 0; v < V; v++) Store(sums + (o * V + v) * kLanes, sum[o][v]);
}

// A task's outputs for a panel. y: from its first row and output on.
template <int V>
void Outputs(const float* xs, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t count) {
  constexpr int kOut = V == 1 ? kSums / 2 : kSums / V;
  alignas(64) float sums[kGroup * V * kLanes], whole[8 * kGroup];
  for (; count > 0; count -= kGroup, w += kGroup * inputs, y += kGroup) {
    const int64_t n = std::min<int64_t>(count, kGroup);
    int64_t o = 0;
    for (; n >= kOut && o < n; o += kOut) {
      for (int64_t r = o * rows / n; r < (o + kOut) * rows / n; r++)  // the lines that are written below
        for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(y + r * outputs + i, 1);
      o = std::min(o, n - kOut);  // the last tile may overlap the one before
      Tile<V, kOut>(xs, w + o * inputs, sums + o * V * kLanes, inputs);
    }
    for (; o < n; o++) Tile<V, 1>(xs, w + o * inputs, sums + o * V * kLanes, inputs);
    // By whole lines of y: with a power of two of outputs, the parts of eight lines would compete for the same places
    // in the cache.
    for (int64_t r = 0; r < rows; r += 8) {
      const int64_t m = std::min<int64_t>(8, rows - r);
      Transpose(sums + r, V * kLanes, whole, kGroup, n, m);
      for (int64_t j = 0; j < m; j++) std::copy_n(whole + j * kGroup, n, y + (r + j) * outputs);
    }
  }
}

template <int V = kVectors>
void UpTo(int64_t vectors, const float* xs, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t count) {
  if (vectors >= V) return Outputs<V>(xs, w, y, rows, inputs, outputs, count);
  if constexpr (V > 1) UpTo<V - 1>(vectors, xs, w, y, rows, inputs, outputs, count);
}

// One row: outputs are the lanes, 16 at a time, and weights are transposed in registers. The same sums.
void OneRow(const float* x, const float* w, float* y, int64_t inputs, int64_t count) {
  for (int64_t o = 0; o < count; o += 16, w += 16 * inputs) {
    const int64_t n = std::min<int64_t>(16, count - o);
    Vec8 sum[2] = {}, lanes[8] = {};
    int64_t i = 0;
    for (; n == 16 && i + 8 <= inputs; i += 8)
      for (int h = 0; h < 2; h++) {
        const float* from = w + h * 8 * inputs + i;
        if (i % 16 == 0)  // the weights that follow
          for (int j = 0; j < 8; j++) __builtin_prefetch(from + (16 + j) * inputs);
        Transpose8(from, inputs, reinterpret_cast<float*>(lanes), 8);
        for (int j = 0; j < 8; j++) sum[h] = MultiplyAdd(x[i + j], lanes[j], sum[h]);
      }
    for (; i < inputs; i++)
      for (int h = 0; h < 2; h++) {
        for (int64_t j = h * 8; j < std::min<int64_t>(n, h * 8 + 8); j++) lanes[0][j % 8] = w[j * inputs + i];
        sum[h] = MultiplyAdd(x[i], lanes[0], sum[h]);
      }
    for (int64_t j = 0; j < n; j++) y[o + j] = sum[j / 8][j % 8];
  }
}

// panels: scratch for x, transposed.
ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> panels) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = w.dimensions()[0];
  const float *from = x.typed_data(), *ws = w.typed_data();
  float *xs = panels->typed_data(), *ys = y->typed_data();
  // With few rows a few tasks a thread: enough to even out, few enough that most tiles have had their weights fetched
  // ahead. With many rows there are more tasks, and the smaller they are, the sooner the last one ends.
  const int64_t groups = rows > kPanel ? 1 : std::max<int64_t>(1, outputs / (pool.num_threads() * 3 * kGroup));
  const int64_t share = groups * kGroup, shares = (outputs + share - 1) / share;
  if (rows == 1) {
    Parallel(pool, shares, [=](int64_t task) {
      OneRow(from, ws + task * share * inputs, ys + task * share, inputs, std::min(share, outputs - task * share));
    });
    return ffi::Error::Success();
  }
  const int64_t count = (rows + kPanel - 1) / kPanel, parts = (inputs + kPart - 1) / kPart;
  std::atomic<int64_t> transposed{0};
  Parallel(pool, count * (parts + shares), [&](int64_t task) {
    // Tasks begin in their order: first all that transpose, whose ends the others can therefore wait for.
    const bool first = task < count * parts;
    const int64_t panel = first ? task / parts : (task - count * parts) % count, r = panel * kPanel;
    const int64_t n = std::min<int64_t>(kPanel, rows - r), vectors = (n + kLanes - 1) / kLanes, width = vectors * kLanes;
    if (first) {
      const int64_t i = task % parts * kPart, m = std::min<int64_t>(kPart, inputs - i);
      float* to = xs + r * inputs + i * width;
      Transpose(from + r * inputs + i, inputs, to, width, n, m);
      for (int64_t j = 0; j < m; j++) std::fill(to + j * width + n, to + (j + 1) * width, 0.f);  // lanes of no row
      transposed.fetch_add(1, std::memory_order_release);
    } else {
      while (transposed.load(std::memory_order_acquire) < count * parts) std::this_thread::yield();
      const int64_t o = (task - count * parts) / count * share;
      UpTo(vectors, xs + r * inputs, ws + o * inputs, ys + r * outputs + o, n, inputs, outputs, std::min(share, outputs - o));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarouselMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
