// Vectors of 16 floats, a few conversions, exp and tanh, and a parallel loop on XLA's threads.
//
// Written with the compiler's generic vectors, so that -march=native makes of it what the machine
// has (AVX-512, AVX2, NEON); only the dot products of bfloat16 and int8 have special instructions.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace tidegate {

namespace ffi = xla::ffi;

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using i8x16 = int8_t __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

template <typename V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <typename V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

inline f32x16 splat(float x) { return x - f32x16{}; }

// 16 consecutive elements as float.
inline f32x16 load16(const float* p) { return load<f32x16>(p); }
inline f32x16 load16(const bf16* p) {
  return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}
inline f32x16 load16(const int8_t* p) {
  return __builtin_convertvector(load<i8x16>(p), f32x16);
}

inline void store16(float* p, f32x16 v) { store(p, v); }
inline void store16(bf16* p, f32x16 v) {
  // Round to nearest even; a NaN keeps a mantissa bit.
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = v == v ? rounded : (bits >> 16) | 0x40;
  store(p, __builtin_convertvector(rounded, u16x16));
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline int8_t from_float<int8_t>(float x) {
  // Saturates; rounds to nearest even under the default rounding mode. A NaN becomes 0.
  if (x != x) return 0;
  return int8_t(__builtin_nearbyintf(std::min(127.0f, std::max(-128.0f, x))));
}

inline float sum(f32x16 v) {
  float t[16], s = 0;
  store(t, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) t[i] += t[i + step];
  return s + t[0];
}

inline float max(f32x16 v) {
  float t[16];
  store(t, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) t[i] = t[i] > t[i + step] ? t[i] : t[i + step];
  return t[0];
}

// e^x to about 1 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a degree 6 polynomial for e^r (Cephes
// expf), and n added to the exponent. Below -87 the result is 0.
inline f32x16 exp16(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 clamped = x > 88.0f ? splat(88.0f) : x;
  clamped = clamped < -87.0f ? splat(-87.0f) : clamped;
  f32x16 n = clamped * 1.44269504088896341f + magic;
  i32x16 exponent = (i32x16)n - (i32x16)magic;
  n = n - magic;
  f32x16 r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  f32x16 result = (f32x16)((i32x16)p + (exponent << 23));
  return x < -87.0f ? f32x16{} : result;
}

inline float exp1(float x) { return exp16(splat(x))[0]; }

inline f32x16 tanh16(f32x16 x) {
  x = x > 20.0f ? splat(20.0f) : x;
  x = x < -20.0f ? splat(-20.0f) : x;
  return 1.0f - 2.0f / (exp16(x + x) + 1.0f);
}

// Calls body(i) for i in [0, count), in the calling thread and in those of XLA's pool that come in
// time. A helper that starts late finds nothing left to do, so a busy pool costs no waiting; only
// items that a helper has begun are waited for.
template <typename Body>
void parallel_for(ffi::ThreadPool& pool, int64_t count, int64_t grain, const Body& body) {
  int64_t chunks = (count + grain - 1) / grain;
  int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, chunks - 1);
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  // `body` lives on the caller's stack: touched only between taking a chunk and reporting it done.
  auto work = [shared, chunks, count, grain, body = &body] {
    for (int64_t c; (c = shared->next.fetch_add(1)) < chunks;) {
      for (int64_t i = c * grain; i < std::min(count, (c + 1) * grain); ++i) (*body)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < chunks; ++spins)
    if (spins > 2000) std::this_thread::yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

}  // namespace tidegate
