// Slot attention on a CPU, as an XLA custom call.
//
// Rows become tiles: consecutive positions of one slot, a few at a time, times one KV head. A tile goes over the live
// keys of its slot in blocks, with an online softmax (arXiv 2205.14135): each live key and value is read once a tile
// and nothing past the live length is touched. Tiles are shared out over XLA's own thread pool.
//
// A row's arithmetic does not depend on the tile that it is in: blocks begin at multiples of kKeys, sums run in the
// order of the head's components and of the keys, and masked keys add exact zeros.

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of accumulators a query, so that they and their operands fit the registers
constexpr int kKeys = 64;                       // a block
constexpr int kQueries = 4;                     // at a time
constexpr int kTileQueries = 96;                // at most, G for each row

inline float ToFloat(float x) { return x; }
inline float ToFloat(uint16_t x) {
  uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline void FromFloat(float x, float* out) { *out = x; }
inline void FromFloat(float x, uint16_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  *out = x == x ? (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 : 0x7FC0;  // to nearest, ties to even
}

// C[q, n] += sum over k of A[q, k] * B[k, n], for R rows q and kVectors * kLanes columns n; A[q, k] = a[q * lda + k].
template <int R>
inline void Product(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t K, int vectors) {
  if (vectors == kVectors) {
    Vec sum[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) sum[r][v] = Load(c + r * ldc + v * kLanes);
    for (int64_t k = 0; k < K; k++) {
      Vec row[kVectors];
      for (int v = 0; v < kVectors; v++) row[v] = Load(b + k * ldb + v * kLanes);
      for (int r = 0; r < R; r++)
        for (int v = 0; v < kVectors; v++) sum[r][v] = MultiplyAdd(a[r * lda + k], row[v], sum[r][v]);
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) Store(c + r * ldc + v * kLanes, sum[r][v]);
    return;
  }
  for (int v = 0; v < vectors; v++) {
    Vec sum[R];
    for (int r = 0; r < R; r++) sum[r] = Load(c + r * ldc + v * kLanes);
    for (int64_t k = 0; k < K; k++)
      for (int r = 0; r < R; r++) sum[r] = MultiplyAdd(a[r * lda + k], Load(b + k * ldb + v * kLanes), sum[r]);
    for (int r = 0; r < R; r++) Store(c + r * ldc + v * kLanes, sum[r]);
  }
}

// The same for any number of rows and of columns that are whole vectors.
void Multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t K, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kVectors * kLanes) {
    int vectors = std::min<int64_t>(kVectors, (columns - n) / kLanes);
    int64_t r = 0;
    for (; r + kQueries <= rows; r += kQueries) Product<kQueries>(a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc, K, vectors);
    switch (rows - r) {
      case 3: Product<3>(a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc, K, vectors); break;
      case 2: Product<2>(a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc, K, vectors); break;
      case 1: Product<1>(a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc, K, vectors); break;
    }
  }
}

struct Shape {
  int64_t T, N, H, B, K, S;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
  float scale;
};

// `rows` consecutive positions of a slot, from `position` on; row `row` of the plan is the first.
struct Tile {
  int64_t row, rows, slot, position;
};

std::vector<Tile> MakeTiles(const Shape& s, const int32_t* slots, const int32_t* positions) {
  std::vector<Tile> tiles;
  const int64_t most = std::max<int64_t>(1, kTileQueries / (s.N / s.K));
  for (int64_t t = 0; t < s.T; t++) {
    if (slots[t] < 0 || slots[t] >= s.B) continue;
    if (!tiles.empty()) {
      Tile& last = tiles.back();
      if (last.row + last.rows == t && last.rows < most && last.slot == slots[t] && last.position + last.rows == positions[t]) {
        last.rows++;
        continue;
      }
    }
    tiles.push_back({t, 1, slots[t], positions[t]});
  }
  return tiles;
}

template <typename Q, typename C>
void Attend(const Shape& s, const Tile& tile, int64_t head, const Q* q, const C* k, const C* v, Q* out) {
  const int64_t G = s.N / s.K, H = s.H, queries = tile.rows * G, padded = (H + kLanes - 1) / kLanes * kLanes;
  constexpr bool kWide = std::is_same_v<C, float>;
  thread_local std::vector<float> scratch;
  scratch.resize(2 * queries * padded + queries * (kKeys + 2) + 3 * kKeys * padded);
  float* query = scratch.data();            // [queries, padded], row-major in (row, group)
  float* result = query + queries * padded;  // [queries, padded]
  float* score = result + queries * padded;  // [queries, kKeys]
  float* top = score + queries * kKeys;      // [queries]
  float* total = top + queries;              // [queries]
  float* keys = total + queries;             // [padded, kKeys], transposed
  float* wide = keys + kKeys * padded;       // [kKeys, padded]
  std::fill(result, result + queries * padded, 0.0f);
  std::fill(top, top + queries, -std::numeric_limits<float>::infinity());
  std::fill(total, total + queries, 0.0f);
  for (int64_t i = 0; i < queries; i++) {
    const Q* from = q + ((tile.row + i / G) * s.N + head * G + i % G) * H;
    for (int64_t h = 0; h < H; h++) query[i * padded + h] = ToFloat(from[h]) * s.scale;
  }
  const int64_t base = (tile.slot * s.K + head) * s.S * H, last = tile.position + tile.rows - 1;
  const int64_t first = s.window ? std::max<int64_t>(0, tile.position - s.window + 1) : 0;
  for (int64_t start = first / kKeys * kKeys; start <= last; start += kKeys) {
    // Rows of the cache that nobody in the tile may read are not read at all: they may hold anything.
    const int64_t low = std::max(first, start), high = std::min(last + 1, start + kKeys);
    const C* key = k + base;
    const float* block;  // rows of `stride` floats from row `low` on
    int64_t stride;
    auto widen = [&](const C* rows) {
      for (int64_t j = low; j < high; j++)
        for (int64_t h = 0; h < H; h++) wide[(j - low) * padded + h] = ToFloat(rows[j * H + h]);
    };
    if constexpr (kWide) {
      block = key + low * H;
      stride = H;
    } else {
      widen(key);
      block = wide;
      stride = padded;
    }
    int64_t j = low;
    for (; j + 8 <= high; j += 8) {
      // The memory is ahead of the arithmetic by a block: these keys' values, and the keys that follow.
      Prefetch(v + base + j * H, 8 * H * sizeof(C));
      if (j + kKeys <= last) Prefetch(key + (j + kKeys) * H, 8 * H * sizeof(C));
      int64_t h = 0;
      for (; h + 8 <= H; h += 8) Transpose8(block + (j - low) * stride + h, stride, keys + h * kKeys + j - start, kKeys);
      for (; h < H; h++)
        for (int64_t i = 0; i < 8; i++) keys[h * kKeys + j + i - start] = block[(j + i - low) * stride + h];
    }
    for (; j < high; j++)
      for (int64_t h = 0; h < H; h++) keys[h * kKeys + j - start] = block[(j - low) * stride + h];
    std::fill(score, score + queries * kKeys, 0.0f);
    const int64_t begin = (low - start) / kLanes * kLanes, end = std::min<int64_t>(kKeys, (high - start + kLanes - 1) / kLanes * kLanes);
    Multiply(query, padded, keys + begin, kKeys, score + begin, kKeys, queries, H, end - begin);
    for (int64_t i = 0; i < queries; i++) {
      const int64_t position = tile.position + i / G;
      const int64_t from = s.window ? std::max(low, position - s.window + 1) : low, to = std::min(high, position + 1);
      float* row = score + i * kKeys;
      if (from >= to) {
        std::fill(row, row + kKeys, 0.0f);
        continue;
      }
      if (s.soft_cap)
        for (int64_t j = from - start; j < to - start; j++) row[j] = s.soft_cap * std::tanh(row[j] / s.soft_cap);
      const float dead = -std::numeric_limits<float>::infinity();
      std::fill(row, row + from - start, dead);
      std::fill(row + to - start, row + kKeys, dead);
      Vec tops = Load(row);
      for (int j = kLanes; j < kKeys; j += kLanes) tops = Max(tops, Load(row + j));
      float new_top = top[i];
      for (int lane = 0; lane < kLanes; lane++) new_top = std::max(new_top, tops[lane]);
      Vec sum = {};
      for (int j = 0; j < kKeys; j += kLanes) {
        Vec weight = Exp(Load(row + j) - new_top);
        Store(row + j, weight);
        sum += weight;
      }
      const float keep = Exp(Vec{} + (top[i] - new_top))[0];
      float block_sum = 0;
      for (int lane = 0; lane < kLanes; lane++) block_sum += sum[lane];
      total[i] = total[i] * keep + block_sum;
      top[i] = new_top;
      if (keep != 1.0f)
        for (int64_t h = 0; h < padded; h += kLanes) Store(result + i * padded + h, Load(result + i * padded + h) * keep);
    }
    const float* value = nullptr;
    int64_t value_stride = H;
    if constexpr (kWide) value = v + base + low * H;
    if (!kWide || H % kLanes) {
      widen(v + base);
      value = wide;
      value_stride = padded;
    }
    Multiply(score + low - start, kKeys, value, value_stride, result, padded, queries, high - low, padded);
  }
  for (int64_t i = 0; i < queries; i++) {
    Q* to = out + ((tile.row + i / G) * s.N + head * G + i % G) * H;
    for (int64_t h = 0; h < H; h++) FromFloat(result[i * padded + h] / total[i], to + h);
  }
}

template <typename Q, typename C>
void Run(ffi::ThreadPool& pool, const Shape& s, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, const int32_t* slots,
         const int32_t* positions, void* out) {
  Q* result = static_cast<Q*>(out);
  for (int64_t t = 0; t < s.T; t++)
    if (slots[t] < 0 || slots[t] >= s.B) std::fill(result + t * s.N * s.H, result + (t + 1) * s.N * s.H, Q{});
  const std::vector<Tile> tiles = MakeTiles(s, slots, positions);
  const int64_t tasks = tiles.size() * s.K;
  Parallel(pool, tasks, [&](int64_t task) {
    Attend(s, tiles[task / s.K], task % s.K, static_cast<const Q*>(q.untyped_data()), static_cast<const C*>(k.untyped_data()),
           static_cast<const C*>(v.untyped_data()), result);
  });
}

ffi::Error SlotAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slots,
                         ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> window, ffi::Result<ffi::AnyBuffer> out, double soft_cap, double scale) {
  const auto qd = q.dimensions(), kd = k.dimensions();
  const Shape s{qd[0], qd[1], qd[2], kd[0], kd[1], kd[2], *window.typed_data(), static_cast<float>(soft_cap), static_cast<float>(scale)};
  const bool wide_q = q.element_type() == ffi::F32, wide_cache = k.element_type() == ffi::F32;
  const auto run = wide_q ? (wide_cache ? Run<float, float> : Run<float, uint16_t>) : (wide_cache ? Run<uint16_t, float> : Run<uint16_t, uint16_t>);
  run(pool, s, q, k, v, slots.typed_data(), positions.typed_data(), out->untyped_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarouselSlotAttention, SlotAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<double>("soft_cap")
                                  .Attr<double>("scale"));
