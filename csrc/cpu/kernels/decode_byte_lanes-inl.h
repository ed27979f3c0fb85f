// S^T = K Q^T of decode for keys of int8 and int4, with rows as lanes (decode_lanes-inl.h). A product multiplies four bytes of a
// key by four bytes of Q in each lane, so keys are not converted.
//
// A row of Q is rounded to int16 (int16_rows-inl.h), and q = 256 high + low with two bytes. Both are signed, and the bytes of a
// key are unsigned: int8 + 128, or the nibbles of int4. With the offset z, 128 or 8, and the unit u of the row:
//
//   S = u (256 sum_c high_c (k_c + z) + sum_c low_c (k_c + z) - z (256 sum_c high_c + sum_c low_c))
//
// The sums of integers are exact. A lane has kSpan units of four bytes of a key. int4 has two planes: even and odd columns.
//
// O += P V for values of int8 and int4: P is rounded to int16, and pairs of keys are multiplied (decode_lane_values-inl.h). int4
// adds P times its nibbles to -8 times the sum of P.
#pragma once

#include "decode_many_rows-inl.h"
#include "int16_rows-inl.h"
#include "softmax-inl.h"

#if defined(FA_DOT_BYTES)

// Products of a step of columns. `q`: [planes][high, low] of vectors. `bytes`: the units of a key in all lanes.
template <int kPlanes>
FA_INLINE void multiply_bytes(const U32 (&q)[kPlanes][2], U32 bytes, S32& high, S32& low) {
  const U32 unsigned_bytes[2] = {kPlanes == 1 ? bytes ^ 0x80808080u : bytes & 0x0f0f0f0fu,
                                 bytes >> 4 & 0x0f0f0f0fu};
#pragma GCC unroll 2
  for (int n = 0; n < kPlanes; ++n) {
    high = FA_DOT_BYTES(high, unsigned_bytes[n], q[n][0]);
    low = FA_DOT_BYTES(low, unsigned_bytes[n], q[n][1]);
  }
}

constexpr int kByteKeys = kDotSums / 2;  // keys at a time: each has two sums

// out = factors * S^T for kByteKeys keys at distance `ld`. `start`: the first sums, [high, low].
template <int kSpan, int kPlanes>
FA_INLINE void byte_lanes_block(const int8_t* q, int64_t steps, const float* start, const int8_t* k,
                                int64_t ld, F32 factors, float* out, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kByteKeys;
  S32 high[N], low[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    high[n] = (S32)load<float>(start);
    low[n] = (S32)load<float>(start + L);
  }
  const int8_t* key[2] = {k, k + 4 * ld};
  int64_t ld3 = 3 * ld;
  asm volatile("" : "+r"(ld3));  // in a register, not computed for each key
  for (int64_t step = 0; step < steps; ++step, q += kPlanes * 2 * FA_VECTOR_BYTES) {
    if (step % 4 == 0) ahead.lines(4 * N * kSpan * 4 / 64);  // of four steps
    U32 query[kPlanes][2];
#pragma GCC unroll 4
    for (int n = 0; n < 2 * kPlanes; ++n)
      query[n / 2][n % 2] = load_elements(reinterpret_cast<const Pair*>(q + n * FA_VECTOR_BYTES));
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const int8_t* unit = key[n / 4] + (n % 4 == 3 ? ld3 : n % 4 * ld) + step * 4 * kSpan;
      multiply_bytes<kPlanes>(query, broadcast_span<kSpan>(reinterpret_cast<const Pair*>(unit)), high[n],
                              low[n]);
    }
  }
  F32 sum[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
    sum[n] = __builtin_convertvector(high[n], F32) * 256.0f + __builtin_convertvector(low[n], F32);
  sum_spans<float, kSpan, N>(sum);
#pragma GCC unroll 16
  for (int n = 0; n < N / kSpan; ++n) store<float>(out + n * L, sum[n] * factors);
}

// Values of int4, without the offset, as pairs of int16 across two keys: the even and the odd columns.
struct PairNibbles {
  using E = Pair;
  using Sum = S32;
  static constexpr int kKeys = 2, kVectors = 2, kColumnsOfElement = 2;
  FA_INLINE static void load(const int8_t* v, int64_t stride, bool is_last, int64_t, U32* value) {
    const auto bytes_of = [](const int8_t* row) FA_INLINE_LAMBDA {
      return widen(*reinterpret_cast<const UnalignedBytes*>(row));
    };
    const U32 bytes = is_last ? bytes_of(v) : bytes_of(v) | bytes_of(v + stride) << 16;
    value[0] = bytes & 0x000f000fu;
    value[1] = bytes >> 4 & 0x000f000fu;
  }
  FA_INLINE static void order_columns(S32* sum) {
    F32 even = (F32)sum[0], odd = (F32)sum[1];
    interleave_lanes<float>(even, odd);
    sum[0] = (S32)even;
    sum[1] = (S32)odd;
  }
};

// Loads the scales of int4 rows with one group, as load_factors().
inline bool load_scales(const AttentionParams& p, const CacheGroups& groups, int64_t h_kv, int64_t j0,
                        int64_t keys, int64_t ld, float* factors) {
  std::fill(factors, factors + ld, 1.0f);
  F32 probe = {};
  const auto load_run = [&](const auto* from, auto number, int64_t n, int64_t end) {
    // The numbers of the whole run first: a vector load would wait for stores of its parts.
    decltype(number) run[kMostDecodeKeys];
    for (int64_t i = n; i < end; ++i, from += groups.scales.stride_s) run[i - n] = *from;
    for (int64_t i = n; i < end; i += kLanes<float>) {
      const F32 scales = load_columns<float>(run + (i - n), end - i);
      store_columns<float>(factors + i, scales, end - i);
      probe += scales * 0.0f;
    }
  };
  for_each_cache_run(p, j0, keys, [&](int64_t n, int64_t end, int64_t page, int64_t row) {
    groups.is_float16 ? load_run(groups.scales.row<Float16>(page, h_kv, row), Float16{}, n, end)
                      : load_run(groups.scales.row<float>(page, h_kv, row), 0.0f, n, end);
  });
  return sum_lanes<float>(probe) == 0.0f;
}

// In place of KeyFactors.
struct NoFactors {
  static float of(int64_t) { return 1.0f; }
};

// Q of the task's heads as bytes. A head has one or two blocks of rows.
struct ByteLanes {
  static constexpr int64_t kMostRows = kLanes<float>, kMostBlocks = 2;
  static constexpr float kLargest = 127 * 256 + 127;

  int8_t*
      q;  // [heads][blocks][steps][planes][high, low][lanes][4]; null: the products of bfloat16 multiply the keys
  float* starts;   // [heads][blocks][high, low][lanes]   int32
  float* factors;  // [heads][blocks][lanes]   of S^T: the scale of the scores, times the unit of each row
  float* widened;  // [D]   a row of q
  int16_t* rounded;
  int8_t* bytes;  // [planes][high, low][D / planes]   a row of q
  int8_t* copy;  // [keys of a tile][bytes of a key or value]   only for pages of odd sizes, and the last keys
  Pair* probs;   // [block_k / 2][lanes]   P^T of a block of rows as int16
  int64_t block_bytes, cols, key_bytes, value_bytes;
  int planes;
  bool has_values;  // products of integers exist for V, too

  static ByteLanes allocate(Arena& arena, const AttentionParams& p, int64_t heads, int64_t block_k) {
    ByteLanes b{};
    const CacheParams& cache = p.varlen.cache;
    b.cols = p.sizes.head_dim;
    b.planes = cache.dtype == CacheDType::kInt4 ? 2 : 1;
    b.key_bytes = b.cols / b.planes;
    b.value_bytes = p.sizes.head_dim_v / b.planes;
    const auto has_one_scale = [&](const CacheGroups& groups) {
      return cache.dtype == CacheDType::kInt8 ||
             (cache.dtype == CacheDType::kInt4 && groups.count == 1 && !groups.zeros);
    };
    if (!has_one_scale(cache.k_groups) || b.key_bytes % 16 != 0) return b;
    b.has_values = has_one_scale(cache.v_groups) && (b.planes == 1 || b.value_bytes % kLanes<float> == 0);
    b.block_bytes = 2 * b.cols * kLanes<float>;  // with kSpan 1
    b.q = arena.take<int8_t>(heads * kMostBlocks * b.block_bytes);
    b.starts = arena.take<float>(heads * kMostBlocks * 2 * kLanes<float>);
    b.factors = arena.take<float>(heads * kMostBlocks * kLanes<float>);
    b.widened = arena.take<float>(round_up_to_lanes<float>(b.cols));
    b.rounded = arena.take<int16_t>(round_up_to_lanes<float>(b.cols));
    b.bytes = arena.take<int8_t>(2 * b.cols);
    const int64_t whole = ceil_div(block_k, kChunkRows) * kChunkRows;
    b.copy = arena.take<int8_t>(whole * std::max(b.key_bytes, b.value_bytes));
    b.probs = arena.take<Pair>(whole / 2 * kLanes<float>);
    return b;
  }

  bool multiplies(int64_t rows) const {
    return q && rows <= kMostRows && fills_lanes<float>(rows) && uses_lane_blocks<float>(rows);
  }
  // Whether V is multiplied as integers, too. Each group of rows widens nibbles again, so several groups do not pay.
  bool multiplies_values(int64_t rows) const {
    return multiplies(rows) && has_values && (planes == 1 || rows <= kMostValueRows);
  }

  // Loads the rows of the task's head `n`.
  void load_queries(int64_t n, int64_t rows, const BFloat16* from, int64_t ld, float scale) const {
    if (!multiplies(rows)) return;
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t block = n * kMostBlocks + (first > 0);
      for_span<float>(count, [&](auto span) {
        planes == 1 ? load_block<span.value, 1>(block, from + first * ld, ld, count, scale)
                    : load_block<span.value, 2>(block, from + first * ld, ld, count, scale);
      });
    });
  }

  // factor * S^T of head `n`, for `keys` keys from key j of the tile on.
  void load_scores(int64_t n, int64_t rows, Rows<int8_t> k, int64_t j, int64_t keys, float factor,
                   const LaneTile<float>& to, Prefetcher& ahead) const {
    constexpr int64_t L = kLanes<float>;
    if (keys % kByteKeys != 0 && k.data != copy) {  // a block may not read past the last key
      for (int64_t i = 0; i < keys; ++i) std::memcpy(copy + i * key_bytes, k.row(i), key_bytes);
      k = {copy, key_bytes, key_bytes};
    }
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t block = n * kMostBlocks + (first > 0);
      for_span<float>(count, [&](auto span) {
        constexpr int kSpan = span.value;
        const F32 of_lanes = load<float>(factors + block * L) * factor;
        const auto load_block = [&](auto some) {
          for (int64_t i = 0; i < keys; i += kByteKeys)
            byte_lanes_block<kSpan, some.value>(q + block * block_bytes, key_bytes / (4 * kSpan),
                                                starts + block * 2 * L, k.row(i), k.stride, of_lanes,
                                                to.at(first, count, j + i), ahead);
        };
        planes == 1 ? load_block(std::integral_constant<int, 1>{})
                    : load_block(std::integral_constant<int, 2>{});
      });
    });
  }

  // out += factor * P V for `keys` keys from all.first_key on. `v`: their chunks. `factors`: of each key; null: 1.
  template <class ManyRows>
  void add_values(const ManyRows& many, const AllProbs<float>& all, float factor, const float* factors,
                  int64_t rows, const Rows<int8_t>* v, int64_t keys, float* out, int64_t ldo,
                  Prefetcher& ahead) const {
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t lanes = lanes_of<float>(count);
      const int64_t whole = ceil_div(keys, kChunkRows) * kChunkRows;
      float units[kLanes<float>];
      int32_t starts[kLanes<float>];
      const float* p = many.block_of(all, first, count, keys);
      factors ? round_probs(p, KeyFactors<float>(factors, lanes), whole, lanes, factor, units)
              : round_probs(p, NoFactors{}, whole, lanes, factor, units);
      const auto add = [&](auto values, const int32_t* from) {
        add_values_of_lanes<decltype(values)>({probs, lanes, units, from}, count, v, keys, out + first * ldo,
                                              ldo, ahead);
      };
      if (planes == 1) return add(PairValues<int8_t, S32>{}, nullptr);
      sum_probs(whole, lanes, starts);
      add(PairNibbles{}, starts);
    });
  }

 private:
  template <int kSpan, int kPlanes>
  void load_block(int64_t block, const BFloat16* from, int64_t ld, int64_t rows, float scale) const {
    constexpr int L = kLanes<float>;
    int8_t* to = q + block * block_bytes;
    auto* start = reinterpret_cast<int32_t*>(starts + block * 2 * L);
    std::fill(start, start + 2 * L, 0);
    for (int64_t r = 0; r < L / kSpan; ++r) {
      if (r >= rows) std::fill(bytes, bytes + 2 * cols, int8_t{0});
      const float factor = r < rows ? scale * round_query<kPlanes>(from + r * ld) : 0.0f;
      for (int64_t i = r; i < L; i += L / kSpan) factors[block * L + i] = factor;
      for (int part = 0; part < 2 * kPlanes; ++part) {
        const int8_t* own = bytes + part * key_bytes;
        int32_t sum = 0;
        for (int64_t c = 0; c < key_bytes; ++c) sum += own[c];
        start[part % 2 * L + r * kSpan] -= (kPlanes == 1 ? 128 : static_cast<int32_t>(kInt4Zero)) * sum;
        int8_t* lane = to + (part * L + r * kSpan) * 4;
        for (int64_t c = 0; c < key_bytes; c += 4 * kSpan, lane += 2 * kPlanes * L * 4)
          std::memcpy(lane, own + c, 4 * kSpan);
      }
    }
  }

  // Writes the low and the high byte of every kStride-th word. Without __restrict bytes may alias anything, so the compiler
  // would use no vectors.
  template <int kStride>
  static void split_words(const int16_t* __restrict words, int64_t count, int8_t* __restrict low,
                          int8_t* __restrict high) {
    for (int64_t c = 0; c < count; ++c) {
      const int16_t x = words[c * kStride];
      low[c] = static_cast<int8_t>(x);
      high[c] = static_cast<int8_t>((x + 128) >> 8);
    }
  }

  // Rounds a row of q to bytes. Returns its unit.
  template <int kPlanes>
  float round_query(const BFloat16* from) const {
    for (int64_t c = 0; c < cols; c += kLanes<float>)
      store<float>(widened + c, load_columns<float>(from + c, cols - c));
    const float unit = round_row(widened, cols, kLargest, rounded);
    for (int plane = 0; plane < kPlanes; ++plane)
      split_words<kPlanes>(rounded + plane, key_bytes, bytes + (2 * plane + 1) * key_bytes,
                           bytes + 2 * plane * key_bytes);
    return unit;
  }

  // starts = -(the offset of nibbles) * (the sum of the rounded P of each row).
  void sum_probs(int64_t keys, int64_t lanes, int32_t* starts) const {
    constexpr int L = kLanes<float>;
    S32 sum = {};
    for (int64_t n = 0; n < keys / 2 * lanes; n += L)
      sum = multiply_add(sum, U32{} + 0x00010001u, load_elements(probs + n));
    for (int d = L / 2; d >= lanes; d /= 2) sum += (S32)rotate<float>((F32)sum, d);
    store<float>(reinterpret_cast<float*>(starts), (F32)(sum * -static_cast<int32_t>(kInt4Zero)));
  }

  // Rounds P^T of a block, [keys][lanes], times the factors of its keys, to pairs of keys, [keys / 2][lanes]. Sets factor *
  // (the unit of each row).
  template <class Factors>
  void round_probs(const float* p, const Factors& factors, int64_t keys, int64_t lanes, float factor,
                   float* units) const {
    constexpr int L = kLanes<float>;
    constexpr float kToWhole = 0x1.8p23f, kMost = std::numeric_limits<float>::max();
    // Magnitudes compare like their bits. Inf and NaN compare above all finite numbers.
    S32 highest = {};
    const auto take = [&](S32 x) FA_INLINE_LAMBDA { highest = x > highest ? x : highest; };
    for (int64_t n = 0; n < keys * lanes; n += L)
      take((S32)(load<float>(p + n) * factors.of(n)) & 0x7fffffff);
    for (int d = L / 2; d >= lanes; d /= 2) take((S32)rotate<float>((F32)highest, d));
    const F32 largest = (F32)highest, zero = {};
    const auto is_number = largest > zero && largest <= splat<float>(kMost);
    F32 inverse = kLargestInt16 / largest;
    inverse = inverse > splat<float>(kMost) ? splat<float>(kMost) : inverse;
    const F32 if_none = largest == zero ? zero : splat<float>(std::numeric_limits<float>::quiet_NaN());
    store<float>(units, is_number ? factor / inverse : if_none);
    inverse = is_number ? inverse : zero;
    const KeysOfLanes key(lanes);
    for (int64_t n = 0; n < keys * lanes; n += 2 * L) {
      const auto whole_of = [&](int64_t at) FA_INLINE_LAMBDA {
        return load<float>(p + at) * factors.of(at) * inverse + kToWhole;
      };
      const F32 first = whole_of(n), second = whole_of(n + L);
      store_elements(probs + n / 2, ((U32)pick<float>(first, second, key.even) & 0xffffu) |
                                        (U32)pick<float>(first, second, key.odd) << 16);
    }
  }
};

#else

struct ByteLanes {
  static ByteLanes allocate(Arena&, const AttentionParams&, int64_t, int64_t) { return {}; }
  static bool multiplies(int64_t) { return false; }
  static bool multiplies_values(int64_t) { return false; }
};

#endif
