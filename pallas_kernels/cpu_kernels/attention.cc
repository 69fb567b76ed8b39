// Ragged paged attention and the write of new keys and values.
//
// A layer's pages: [num_pages, 2, kv_heads, page_size * head_dim]; keys are stored [head_dim,
// page_size], so that a vector holds 16 positions and no sum runs across lanes; values are stored
// [page_size, head_dim]. page_size and head_dim are multiples of 16.
//
// A unit of work is one key/value head and a tile of query tokens of one row, with all the query
// heads that share the head. It walks its context in blocks of 64 positions with an online softmax
// in float32. Blocks begin at multiples of 64, every query goes through the same operations in the
// same order whatever else is in its tile, and a block in which it sees nothing leaves its state
// as it was, bit by bit: so results do not depend on batch, chunks or tiles.
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace tidegate {
namespace {

constexpr int kBlock = 64;      // positions per step of the online softmax
constexpr int kQueries = 48;    // query vectors (tokens x heads of the group) in a tile, about
// Query vectors whose scores are in registers together; each size is compiled.
constexpr int kRows[] = {12, 8, 6, 4, 3, 2, 1};

inline int rows_at_once(int64_t left) {
  int i = 0;
  while (kRows[i] > left) ++i;
  return i;
}
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t page_size, kv_heads, group, d, tokens, rows, width;
  int64_t page_stride() const { return 2 * kv_heads * page_size * d; }
};

struct Batch {
  const int32_t *cu_q_lens, *kv_lens, *page_indices, *slots;
  int64_t num_seqs, num_decodes;
};

struct Options {
  float sm_scale, soft_cap;
  int64_t window;
  const float *k_scale, *v_scale, *sinks;
};

struct Unit {
  int32_t row, head, begin, end;  // query tokens begin..end-1
};

template <typename T, typename KV>
inline void write_token(const T* k, const T* v, KV* pages, const Shape& s, const Options& o,
                        int64_t token, int64_t head, int64_t slot) {
  KV* key = pages + slot / s.page_size * s.page_stride() + head * s.page_size * s.d;
  KV* value = key + s.kv_heads * s.page_size * s.d;
  int64_t offset = slot % s.page_size;
  const T* from_k = k + (token * s.kv_heads + head) * s.d;
  const T* from_v = v + (token * s.kv_heads + head) * s.d;
  for (int64_t i = 0; i < s.d; ++i) {
    float x = to_float(from_k[i]), y = to_float(from_v[i]);
    if (o.k_scale) x = x / o.k_scale[head];
    if (o.v_scale) y = y / o.v_scale[head];
    key[i * s.page_size + offset] = from_float<KV>(x);
    value[offset * s.d + i] = from_float<KV>(y);
  }
}

// scores[m][0..15] = q[m] . key over head_dim, for 16 positions. q: [M, d]; key: [d, stride].
template <int M, typename KV>
void score16(const float* q, const KV* key, int64_t stride, int64_t d, float* scores) {
  f32x16 acc[M] = {};
  for (int64_t i = 0; i < d; ++i) {
    f32x16 k = load16(key + i * stride);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) acc[m] += q[m * d + i] * k;
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) store16(scores + m * kBlock, acc[m]);
}

// acc[m] = acc[m] * shrink[m] + sum over positions [from, to) of weights[m][p] * value[p], for 32
// (or 16) of the d values. values[p / 16] points to 16 positions of [16, d].
template <int M, int V, typename KV>
void accumulate(const float* weights, const KV* const* values, int64_t from, int64_t to, int64_t d,
                int64_t column, const float* shrink, float* out) {
  f32x16 acc[M][V];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < V; ++j) acc[m][j] = load16(out + m * d + column + 16 * j) * shrink[m];
  for (int64_t p = from; p < to; ++p) {
    const KV* value = values[p / 16] + p % 16 * d + column;
    f32x16 v[V];
#pragma GCC unroll 2
    for (int j = 0; j < V; ++j) v[j] = load16(value + 16 * j);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int j = 0; j < V; ++j) acc[m][j] += weights[m * kBlock + p] * v[j];
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < V; ++j) store16(out + m * d + column + 16 * j, acc[m][j]);
}

template <typename KV>
using Score = void (*)(const float*, const KV*, int64_t, int64_t, float*);
template <typename KV>
using Accumulate = void (*)(const float*, const KV* const*, int64_t, int64_t, int64_t, int64_t,
                            const float*, float*);

#define TIDEGATE_ROWS(F) F(12), F(8), F(6), F(4), F(3), F(2), F(1)

template <typename KV>
struct Tiles {
#define F(M) score16<M, KV>
  static constexpr Score<KV> score[] = {TIDEGATE_ROWS(F)};
#undef F
#define F(M) accumulate<M, 2, KV>
  static constexpr Accumulate<KV> wide[] = {TIDEGATE_ROWS(F)};
#undef F
#define F(M) accumulate<M, 1, KV>
  static constexpr Accumulate<KV> narrow[] = {TIDEGATE_ROWS(F)};
#undef F
};

// Masks one query's scores of a block, turns them into weights, updates maximum and sum.
inline void softmax_block(float* scores, int groups, int64_t base, int64_t first, int64_t position,
                          float soft_cap, float& top, float& total, float& shrink) {
  f32x16 lanes, value[kBlock / 16], most = splat(kNegInf);
  for (int i = 0; i < 16; ++i) lanes[i] = float(i);
  for (int g = 0; g < groups; ++g) {
    f32x16 at = lanes + float(16 * g);
    f32x16 x = load16(scores + 16 * g);
    if (soft_cap > 0) x = soft_cap * tanh16(x / soft_cap);
    x = (at >= float(first - base)) & (at <= float(position - base)) ? x : splat(kNegInf);
    most = x > most ? x : most;
    value[g] = x;
  }
  float block_top = max(most);
  float new_top = top > block_top ? top : block_top;
  f32x16 add = {};
  if (new_top == kNegInf) new_top = 0;  // nothing seen yet: every weight below is exp(-inf) = 0
  for (int g = 0; g < groups; ++g) {
    f32x16 weight = exp16(value[g] - new_top);
    store16(scores + 16 * g, weight);
    add += weight;
  }
  shrink = block_top > top ? exp1(top - new_top) : 1.0f;
  total = total * shrink + sum(add);
  if (block_top > top) top = block_top;
}

template <typename T, typename KV>
void attend_unit(const Unit& unit, const T* q, const KV* pages, const Batch& b, const Shape& s,
                 const Options& o, T* out) {
  int64_t d = s.d, q_heads = s.kv_heads * s.group, count = (unit.end - unit.begin) * s.group;
  thread_local std::vector<float> memory;
  memory.resize(count * (2 * d + kBlock + 3));
  float* query = memory.data();  // [count, d], count = tokens x group
  float* acc = query + count * d;
  float* scores = acc + count * d;  // [count, kBlock]
  float *top = scores + count * kBlock, *total = top + count, *shrink = total + count;

  float scale = o.sm_scale * (o.k_scale ? o.k_scale[unit.head] : 1.0f);
  for (int64_t m = 0; m < count; ++m) {
    int64_t head = unit.head * s.group + m % s.group;
    const T* from = q + ((unit.begin + m / s.group) * q_heads + head) * d;
    for (int64_t i = 0; i < d; i += 16) {
      store16(query + m * d + i, load16(from + i) * scale);
      store16(acc + m * d + i, f32x16{});
    }
    top[m] = o.sinks ? o.sinks[head] : kNegInf;
    total[m] = o.sinks ? 1.0f : 0.0f;
  }

  int64_t start = b.cu_q_lens[unit.row], kv_len = b.kv_lens[unit.row];
  int64_t position = kv_len - (b.cu_q_lens[unit.row + 1] - start) + unit.begin - start;
  int64_t limit = position + unit.end - unit.begin;  // one past the last position seen
  int64_t first = o.window ? std::max<int64_t>(0, position - o.window + 1) : 0;
  const int32_t* table = b.page_indices + unit.row * s.width;
  for (int64_t base = first / kBlock * kBlock; base < limit; base += kBlock) {
    int64_t from = std::max<int64_t>(first - base, 0), to = std::min<int64_t>(limit - base, kBlock);
    int groups = int((to + 15) / 16);
    const KV* values[kBlock / 16];
    for (int g = 0; g < groups; ++g) {
      int64_t at = base + 16 * g, offset = at % s.page_size;
      if (at + 16 <= first) continue;  // its page may be gone
      const KV* key = pages + table[at / s.page_size] * s.page_stride() + unit.head * s.page_size * d;
      values[g] = key + s.kv_heads * s.page_size * d + offset * d;
      for (int64_t m = 0, i; m < count; m += kRows[i]) {
        i = rows_at_once(count - m);
        Tiles<KV>::score[i](query + m * d, key + offset, s.page_size, d,
                            scores + m * kBlock + 16 * g);
      }
    }
    for (int64_t m = 0; m < count; ++m) {
      int64_t mine = position + m / s.group;
      int64_t oldest = o.window ? std::max<int64_t>(0, mine - o.window + 1) : 0;
      softmax_block(scores + m * kBlock, groups, base, oldest, mine, o.soft_cap, top[m], total[m],
                    shrink[m]);
    }
    for (int64_t m = 0, i; m < count; m += kRows[i]) {
      i = rows_at_once(count - m);
      int64_t column = 0;
      for (; column + 32 <= d; column += 32)
        Tiles<KV>::wide[i](scores + m * kBlock, values, from, to, d, column, shrink + m,
                                  acc + m * d);
      if (column < d)
        Tiles<KV>::narrow[i](scores + m * kBlock, values, from, to, d, column, shrink + m,
                                    acc + m * d);
    }
  }

  for (int64_t m = 0; m < count; ++m) {
    int64_t head = unit.head * s.group + m % s.group;
    T* to = out + ((unit.begin + m / s.group) * q_heads + head) * d;
    float factor = total[m] > 0 ? (o.v_scale ? o.v_scale[unit.head] : 1.0f) / total[m] : 0.0f;
    for (int64_t i = 0; i < d; i += 16) store16(to + i, load16(acc + m * d + i) * factor);
  }
}

template <typename T, typename KV>
void run(ffi::ThreadPool& pool, bool write, bool attend, const T* q, const T* k, const T* v, KV* pages,
         const Batch& b, const Shape& s, const Options& o, T* out) {
  int64_t used = b.cu_q_lens[b.num_seqs];
  // A decoding row's token is written by the unit that reads it; other rows' before any is read.
  int64_t early = attend && write ? std::min<int64_t>(b.num_decodes, used) : 0;
  if (write)
    parallel_for(pool, used - early, 16, [&](int64_t i) {
      for (int64_t h = 0; h < s.kv_heads; ++h)
        write_token(k, v, pages, s, o, early + i, h, b.slots[early + i]);
    });
  if (!attend) return;
  int64_t width = s.kv_heads * s.group * s.d;
  std::memset(out + used * width, 0, (s.tokens - used) * width * sizeof(T));
  thread_local std::vector<Unit> scratch;
  std::vector<Unit>& units = scratch;
  units.clear();
  int32_t step = int32_t(std::max<int64_t>(1, kQueries / s.group));
  for (int32_t row = 0; row < b.num_seqs; ++row) {
    int32_t begin = b.cu_q_lens[row], end = b.cu_q_lens[row + 1];
    if (b.kv_lens[row] == 0) {
      std::memset(out + begin * width, 0, (end - begin) * width * sizeof(T));
      continue;
    }
    // Later tiles see more context: they go first, so that the last unit to finish is short.
    for (int32_t at = begin + (end - begin - 1) / step * step; at >= begin && end > begin; at -= step)
      for (int32_t head = 0; head < s.kv_heads; ++head)
        units.push_back({row, head, at, std::min(at + step, end)});
  }
  parallel_for(pool, units.size(), 1, [&](int64_t i) {
    const Unit& unit = units[i];
    if (write && unit.row < b.num_decodes)
      write_token(k, v, pages, s, o, unit.begin, unit.head, b.slots[unit.begin]);
    attend_unit<T, KV>(unit, q, pages, b, s, o, out);
  });
}

template <typename T>
ffi::Error dispatch(ffi::ThreadPool& pool, bool write, bool attend, const void* q, const void* k,
                    const void* v, ffi::AnyBuffer& pages, const Batch& b, const Shape& s,
                    const Options& o, void* out) {
  auto call = [&](auto* typed) {
    run(pool, write, attend, static_cast<const T*>(q), static_cast<const T*>(k),
        static_cast<const T*>(v), typed, b, s, o, static_cast<T*>(out));
    return ffi::Error::Success();
  };
  switch (pages.element_type()) {
    case ffi::F32: return call(static_cast<float*>(pages.untyped_data()));
    case ffi::BF16: return call(static_cast<bf16*>(pages.untyped_data()));
    case ffi::S8: return call(static_cast<int8_t*>(pages.untyped_data()));
    default: return ffi::Error::InvalidArgument("pages: f32, bf16 or int8");
  }
}

using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;

// q [T, Hq, D]; k, v [T, H, D]; pages [N, 2, H, S * D]; scales and sinks are empty where absent.
ffi::Error handle(ffi::ThreadPool& pool, bool write, bool attend, ffi::AnyBuffer q, ffi::AnyBuffer k,
                  ffi::AnyBuffer v, ffi::AnyBuffer pages, I32 cu_q_lens, I32 kv_lens,
                  I32 page_indices, I32 num_seqs, I32 num_decodes, I32 slots, F32 k_scale, F32 v_scale,
                  F32 sinks, float sm_scale, float soft_cap, int64_t window, void* out) {
  ffi::AnyBuffer& x = attend ? q : k;
  Shape s;
  s.kv_heads = pages.dimensions()[2];
  s.d = x.dimensions()[2];
  s.page_size = pages.dimensions()[3] / s.d;
  s.group = attend ? q.dimensions()[1] / s.kv_heads : 1;
  s.tokens = x.dimensions()[0];
  s.rows = kv_lens.dimensions()[0];
  s.width = page_indices.dimensions()[1];
  Batch b{cu_q_lens.typed_data(), kv_lens.typed_data(), page_indices.typed_data(),
          slots.typed_data(), num_seqs.typed_data()[0], num_decodes.typed_data()[0]};
  Options o{sm_scale, soft_cap, window,
            k_scale.element_count() ? k_scale.typed_data() : nullptr,
            v_scale.element_count() ? v_scale.typed_data() : nullptr,
            sinks.element_count() ? sinks.typed_data() : nullptr};
  if (x.element_type() == ffi::F32)
    return dispatch<float>(pool, write, attend, q.untyped_data(), k.untyped_data(), v.untyped_data(),
                           pages, b, s, o, out);
  if (x.element_type() == ffi::BF16)
    return dispatch<bf16>(pool, write, attend, q.untyped_data(), k.untyped_data(), v.untyped_data(),
                          pages, b, s, o, out);
  return ffi::Error::InvalidArgument("queries, keys and values: f32 or bf16");
}

#define TIDEGATE_BATCH_PARAMS                                                                     \
  I32 cu_q_lens, I32 kv_lens, I32 page_indices, I32 num_seqs, I32 num_decodes, I32 slots,         \
      F32 k_scale, F32 v_scale, F32 sinks
#define TIDEGATE_BATCH_ARGS \
  cu_q_lens, kv_lens, page_indices, num_seqs, num_decodes, slots, k_scale, v_scale, sinks

// The pages' result shares the argument's memory (input_output_aliases): written in place.
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                  ffi::AnyBuffer pages, TIDEGATE_BATCH_PARAMS, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::AnyBuffer> written, float sm_scale, float soft_cap, int64_t window) {
  return handle(pool, true, true, q, k, v, *written, TIDEGATE_BATCH_ARGS, sm_scale, soft_cap, window,
                out->untyped_data());
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages,
                     TIDEGATE_BATCH_PARAMS, ffi::Result<ffi::AnyBuffer> out, float sm_scale,
                     float soft_cap, int64_t window) {
  return handle(pool, false, true, q, q, q, pages, TIDEGATE_BATCH_ARGS, sm_scale, soft_cap, window,
                out->untyped_data());
}

ffi::Error kv_write(ffi::ThreadPool pool, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer pages,
                    TIDEGATE_BATCH_PARAMS, ffi::Result<ffi::AnyBuffer> written) {
  return handle(pool, true, false, k, k, v, *written, TIDEGATE_BATCH_ARGS, 1.0f, 0.0f, 0, nullptr);
}

#define TIDEGATE_BIND_BATCH                                                                      \
  .Arg<I32>().Arg<I32>().Arg<I32>().Arg<I32>().Arg<I32>().Arg<I32>().Arg<F32>().Arg<F32>().Arg<F32>()

}  // namespace
}  // namespace tidegate

// The macros name types of the namespace.
using tidegate::F32;
using tidegate::I32;
namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(tidegate_attend, tidegate::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>() TIDEGATE_BIND_BATCH.Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(tidegate_attention, tidegate::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>() TIDEGATE_BIND_BATCH.Ret<ffi::AnyBuffer>()
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(tidegate_kv_write, tidegate::kv_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>() TIDEGATE_BIND_BATCH.Ret<ffi::AnyBuffer>());
