// y = x / sqrt(mean(x * x) + eps) * (offset + weight) for any number of rows, as an XLA custom call.
//
// A row's squares are summed in an order that only the width decides: in lanes, then the lanes by halves. XLA's order
// depends on how many rows there are.

#include <cmath>

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

constexpr int kSums = 4;  // vectors of sums, so that additions need not wait for one another

template <typename F>
void Row(const F* x, const F* weight, F* y, int64_t width, float eps, float offset) {
  Vec sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    for (int s = 0; s < kSums; s++) {
      const Vec one = Load(x + i + s * kLanes);
      sums[s] = MultiplyAdd(one, one, sums[s]);
    }
  for (int s = 0; i < width; i += kLanes, s++) {
    const Vec one = LoadSome(x + i, width - i);
    sums[s] = MultiplyAdd(one, one, sums[s]);
  }
  const float scale = 1 / std::sqrt(Total((sums[0] + sums[1]) + (sums[2] + sums[3])) / width + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) Store(y + i, Load(x + i) * scale * (Load(weight + i) + offset));
  const int64_t n = width - i;
  if (n) StoreSome(y + i, n, LoadSome(x + i, n) * scale * (LoadSome(weight + i, n) + offset));
}

template <typename F>
void Rows(ffi::ThreadPool& pool, const void* x, const void* weight, void* y, int64_t count, int64_t width, float eps, float offset) {
  ForRows(pool, count, width, [=](int64_t row) {
    Row(static_cast<const F*>(x) + row * width, static_cast<const F*>(weight), static_cast<F*>(y) + row * width, width, eps, offset);
  });
}

// x and y have the weight's type: float32, or bfloat16 whose sums and products are in float32.
ffi::Error Norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y, double eps, double offset) {
  const int64_t width = weight.dimensions()[0], count = x.element_count() / width;
  const auto rows = x.element_type() == ffi::F32 ? Rows<float> : Rows<uint16_t>;
  rows(pool, x.untyped_data(), weight.untyped_data(), y->untyped_data(), count, width, eps, offset);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarouselNorm, Norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<double>("eps")
                                  .Attr<double>("offset"));
