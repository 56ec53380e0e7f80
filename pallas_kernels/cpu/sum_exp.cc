// sum(exp(x)) of each row, as an XLA custom call: in an order that only the width decides, as in norm.cc.

#include <limits>

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

constexpr int kSums = 4;  // vectors of sums, so that additions need not wait for one another
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline Vec ExpOrNaN(Vec x) { return x == x ? Exp(x) : x; }

float Row(const float* x, int64_t width) {
  Vec sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    for (int s = 0; s < kSums; s++) sums[s] += ExpOrNaN(Load(x + i + s * kLanes));
  for (int s = 0; i < width; i += kLanes, s++) sums[s] += ExpOrNaN(LoadSome(x + i, width - i, kNothing));
  return Total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

ffi::Error SumExp(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t width = x.dimensions().back();
  const float* from = x.typed_data();
  float* to = y->typed_data();
  ForRows(pool, y->element_count(), width, [=](int64_t row) { to[row] = Row(from + row * width, width); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarouselSumExp, SumExp,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
