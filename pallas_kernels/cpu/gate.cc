// activation(gate) * up for rows that hold gate and then up, as an XLA custom call.
//
// Each number is computed in the same way wherever it lies. XLA rounds differently from one shape to another where rows
// are narrow, and in bfloat16 takes four times as long.

#include "vector.h"

namespace ffi = xla::ffi;

namespace {

using namespace carousel;

// x * sigmoid(x), or x * sigmoid(2 * y), which is gelu with tanh(y) for y = sqrt(2 / pi) * (x + 0.044715 * x^3).
inline Vec Activate(Vec x, bool gelu) {
  const Vec inner = gelu ? x * MultiplyAdd(x * x, Vec{} + 0.0713548163f, Vec{} + 1.59576912f) : x;
  const Vec small = Exp(inner > Vec{} ? -inner : inner);
  const Vec value = x * ((inner > Vec{} ? Vec{} + 1.0f : small) / (small + 1.0f));
  return x == x ? value : x;
}

template <typename F>
void Rows(ffi::ThreadPool& pool, const void* x, void* y, int64_t rows, int64_t width, bool gelu) {
  ForRows(pool, rows, width, [=](int64_t row) {
    const F *gate = static_cast<const F*>(x) + row * 2 * width, *up = gate + width;
    F* to = static_cast<F*>(y) + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) Store(to + i, Activate(Load(gate + i), gelu) * Load(up + i));
    if (i < width) StoreSome(to + i, width - i, Activate(LoadSome(gate + i, width - i), gelu) * LoadSome(up + i, width - i));
  });
}

// float32, or bfloat16 that is computed in float32.
ffi::Error Gate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, bool gelu) {
  const auto run = x.element_type() == ffi::F32 ? Rows<float> : Rows<uint16_t>;
  run(pool, x.untyped_data(), y->untyped_data(), y->dimensions()[0], y->dimensions()[1], gelu);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarouselGate, Gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("gelu"));
