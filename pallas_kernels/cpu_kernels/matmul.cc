// y[M, N] = x[M, K] @ w (* scale) (+ bias) with w packed in panels of 32 output channels.
//
// Packed weight: [ceil(N/32), K/P, 32, P] with P = 1 (float32), 2 (bfloat16) or 4 (int8)
// neighbouring inputs of a channel side by side, which is what the dot product instructions eat and
// what makes a panel one contiguous stream. A panel is multiplied with up to 12 rows at a time, all
// accumulators in registers; it comes from memory once and from the cache for further rows.
//
// Every output element is one accumulator over K in order, whatever M is: results do not depend on
// how many rows are computed together.
#include <vector>

#include "simd.h"

namespace tidegate {
namespace {

constexpr int kPanel = 32;  // output channels: two vectors
// Rows at a time; each size is compiled. 12 x 2 accumulators, 2 weights, 1 broadcast: 27 of 32 registers.
constexpr int kRows[] = {12, 8, 6, 4, 3, 2, 1};

// A kernel's Step multiplies P inputs of one row (as stored at a) with two vectors of weights.
struct F32 {
  using X = float;
  using W = float;
  using Acc = f32x16;
  static constexpr int P = 1;
  static inline void step(const X* a, const W* w, Acc& lo, Acc& hi) {
    lo += *a * load<f32x16>(w);
    hi += *a * load<f32x16>(w + 16);
  }
};

inline f32x16 even(u32x16 pair) { return (f32x16)(pair << 16); }
inline f32x16 odd(u32x16 pair) { return (f32x16)(pair & 0xffff0000u); }

// float32 inputs, bfloat16 weights: exact products, float32 sums.
struct F32xBF16 {
  using X = float;
  using W = bf16;
  using Acc = f32x16;
  static constexpr int P = 2;
  static inline void step(const X* a, const W* w, Acc& lo, Acc& hi) {
    u32x16 w0 = load<u32x16>(w), w1 = load<u32x16>(w + 32);
    lo += a[0] * even(w0);
    hi += a[0] * even(w1);
    lo += a[1] * odd(w0);
    hi += a[1] * odd(w1);
  }
};

struct BF16 {
  using X = bf16;
  using W = bf16;
  using Acc = f32x16;
  static constexpr int P = 2;
  static inline void step(const X* a, const W* w, Acc& lo, Acc& hi) {
    uint32_t pair;
    std::memcpy(&pair, a, 4);
#if defined(__AVX512BF16__)
    __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
    lo = (f32x16)_mm512_dpbf16_ps((__m512)lo, x, (__m512bh)load<u32x16>(w));
    hi = (f32x16)_mm512_dpbf16_ps((__m512)hi, x, (__m512bh)load<u32x16>(w + 32));
#else
    float x[2] = {to_float(a[0]), to_float(a[1])};
    F32xBF16::step(x, w, lo, hi);
#endif
  }
};

// Inputs are shifted by 128 to unsigned, as vpdpbusd wants them; the epilogue takes that back.
struct I8 {
  using X = uint8_t;
  using W = int8_t;
  using Acc = i32x16;
  static constexpr int P = 4;
  static inline void step(const X* a, const W* w, Acc& lo, Acc& hi) {
#if defined(__AVX512VNNI__)
    int32_t quad;
    std::memcpy(&quad, a, 4);
    __m512i x = _mm512_set1_epi32(quad);
    lo = (i32x16)_mm512_dpbusd_epi32((__m512i)lo, x, (__m512i)load<i32x16>(w));
    hi = (i32x16)_mm512_dpbusd_epi32((__m512i)hi, x, (__m512i)load<i32x16>(w + 64));
#else
    i32x16 w0 = load<i32x16>(w), w1 = load<i32x16>(w + 64);
    for (int i = 0; i < 4; ++i) {
      lo += int32_t(a[i]) * ((w0 << (24 - 8 * i)) >> 24);
      hi += int32_t(a[i]) * ((w1 << (24 - 8 * i)) >> 24);
    }
#endif
  }
};

struct Epilogue {
  const float* scale = nullptr;       // [N], of weights
  const int32_t* column_sum = nullptr;  // [N], int8 only
  const float* bias = nullptr;        // [N]
  const float* row_scale = nullptr;   // [M], int8 only
  int64_t n;
};

template <typename T>
inline f32x16 tail_load(const T* p, int64_t left) {
  if (left >= 16) return __builtin_convertvector(load<std::conditional_t<std::is_same_v<T, float>, f32x16, i32x16>>(p), f32x16);
  float t[16] = {};
  for (int64_t i = 0; i < left; ++i) t[i] = float(p[i]);
  return load<f32x16>(t);
}

template <typename Y>
inline void finish(f32x16 v, const Epilogue& e, int64_t row, int64_t column, Y* y) {
  int64_t left = e.n - column;
  if (left <= 0) return;
  if (e.column_sum) v = (v - 128.0f * tail_load(e.column_sum + column, left)) * e.row_scale[row];
  if (e.scale) v = v * tail_load(e.scale + column, left);
  if (e.bias) v = v + tail_load(e.bias + column, left);
  y += row * e.n + column;
  if (left >= 16) {
    store16(y, v);
  } else {
    Y t[16];
    store16(t, v);
    std::copy(t, t + left, y);
  }
}

inline f32x16 as_float(f32x16 v) { return v; }
inline f32x16 as_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

template <typename Op, int M, typename Y>
void tile(const typename Op::X* x, const typename Op::W* w, int64_t k, int64_t row, int64_t column,
          const Epilogue& e, Y* y) {
  typename Op::Acc lo[M] = {}, hi[M] = {};
  x += row * k;
  for (int64_t i = 0; i < k; i += Op::P, w += kPanel * Op::P) {
    __builtin_prefetch(w + 1024 / sizeof(*w));
    __builtin_prefetch(w + 1088 / sizeof(*w));
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) Op::step(x + m * k + i, w, lo[m], hi[m]);
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    finish(as_float(lo[m]), e, row + m, column, y);
    finish(as_float(hi[m]), e, row + m, column + 16, y);
  }
}

template <typename Op, typename Y>
void panel(const typename Op::X* x, const typename Op::W* w, int64_t m, int64_t k, int64_t column,
           const Epilogue& e, Y* y) {
  using Tile = void (*)(const typename Op::X*, const typename Op::W*, int64_t, int64_t, int64_t,
                        const Epilogue&, Y*);
  static constexpr Tile tiles[] = {tile<Op, 12, Y>, tile<Op, 8, Y>, tile<Op, 6, Y>, tile<Op, 4, Y>,
                                   tile<Op, 3, Y>,  tile<Op, 2, Y>, tile<Op, 1, Y>};
  for (int64_t row = 0; row < m;) {
    int64_t left = m - row;
    int i = 0;
    while (kRows[i] > left) ++i;
    if (left == 16) i = 1;  // 8 + 8 keep more accumulators busy than 12 + 4
    tiles[i](x, w, k, row, column, e, y);
    row += kRows[i];
  }
}

template <typename Op, typename Y>
void multiply(ffi::ThreadPool& pool, const typename Op::X* x, const typename Op::W* w, int64_t m,
              int64_t k, const Epilogue& e, Y* y) {
  int64_t panels = (e.n + kPanel - 1) / kPanel;
  int64_t grain = std::max<int64_t>(1, panels / (8 * std::max<int64_t>(1, pool.num_threads())));
  parallel_for(pool, panels, grain, [&](int64_t p) {
    panel<Op>(x, w + p * kPanel * k, m, k, p * kPanel, e, y);
  });
}

// Symmetric int8 per row, stored + 128: q = round(x * 127 / max|x|).
template <typename X>
void quantize_rows(ffi::ThreadPool& pool, const X* x, int64_t m, int64_t k, uint8_t* q, float* scale) {
  parallel_for(pool, m, 32, [&](int64_t row) {
    const X* from = x + row * k;
    uint8_t* to = q + row * k;
    f32x16 top = {};
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) {
      f32x16 v = load16(from + i);
      v = v < 0.0f ? -v : v;
      top = v > top ? v : top;
    }
    float most = max(top);
    for (; i < k; ++i) most = std::max(most, std::abs(to_float(from[i])));
    scale[row] = (most > 0 ? most : 1.0f) / 127.0f;
    float inverse = 1.0f / scale[row];
    const f32x16 magic = splat(12582912.0f);
    for (i = 0; i + 16 <= k; i += 16) {
      f32x16 v = load16(from + i) * inverse + magic;
      i32x16 n = (i32x16)v - (i32x16)magic + 128;
      store(to + i, __builtin_convertvector(n, i8x16));
    }
    for (; i < k; ++i) to[i] = uint8_t(int(__builtin_nearbyintf(to_float(from[i]) * inverse)) + 128);
  });
}

template <typename X, typename Y>
void multiply_int8(ffi::ThreadPool& pool, const X* x, const int8_t* w, int64_t m, int64_t k,
                   Epilogue e, Y* y) {
  thread_local std::vector<uint8_t> q;
  thread_local std::vector<float> scale;
  q.resize(m * k);
  scale.resize(m);
  quantize_rows(pool, x, m, k, q.data(), scale.data());
  e.row_scale = scale.data();
  multiply<I8>(pool, q.data(), w, m, k, e, y);
}

template <typename Y>
ffi::Error dispatch(ffi::ThreadPool& pool, ffi::AnyBuffer& x, ffi::AnyBuffer& w, int64_t m, int64_t k,
                    Epilogue e, Y* y) {
  bool x32 = x.element_type() == ffi::F32;
  if (!x32 && x.element_type() != ffi::BF16) return ffi::Error::InvalidArgument("x: f32 or bf16");
  auto* xf = static_cast<const float*>(x.untyped_data());
  auto* xb = static_cast<const bf16*>(x.untyped_data());
  switch (w.element_type()) {
    case ffi::F32:
      if (!x32) return ffi::Error::InvalidArgument("float32 weights take float32 inputs");
      multiply<F32>(pool, xf, static_cast<const float*>(w.untyped_data()), m, k, e, y);
      return ffi::Error::Success();
    case ffi::BF16: {
      auto* wb = static_cast<const bf16*>(w.untyped_data());
      if (x32) multiply<F32xBF16>(pool, xf, wb, m, k, e, y);
      else multiply<BF16>(pool, xb, wb, m, k, e, y);
      return ffi::Error::Success();
    }
    case ffi::S8: {
      auto* wi = static_cast<const int8_t*>(w.untyped_data());
      if (x32) multiply_int8(pool, xf, wi, m, k, e, y);
      else multiply_int8(pool, xb, wi, m, k, e, y);
      return ffi::Error::Success();
    }
    default:
      return ffi::Error::InvalidArgument("weights: f32, bf16 or int8");
  }
}

// x [M, K]; w packed; scale f32 [N] or [0]; column_sum int32 [N] or [0]; bias f32 [N] or [0].
ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> column_sum,
                  ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y) {
  auto shape = x.dimensions();
  if (shape.size() != 2) return ffi::Error::InvalidArgument("x must be [M, K]");
  Epilogue e;
  e.n = y->dimensions().back();
  if (scale.element_count()) e.scale = scale.typed_data();
  if (column_sum.element_count()) e.column_sum = column_sum.typed_data();
  if (bias.element_count()) e.bias = bias.typed_data();
  if (y->element_type() == ffi::F32)
    return dispatch(pool, x, w, shape[0], shape[1], e, static_cast<float*>(y->untyped_data()));
  if (y->element_type() == ffi::BF16)
    return dispatch(pool, x, w, shape[0], shape[1], e, static_cast<bf16*>(y->untyped_data()));
  return ffi::Error::InvalidArgument("y: f32 or bf16");
}

}  // namespace
}  // namespace tidegate

XLA_FFI_DEFINE_HANDLER_SYMBOL(tidegate_matmul, tidegate::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>());
