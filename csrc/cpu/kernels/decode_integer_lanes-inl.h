// int8 and int4 caches of decode with rows as lanes, without a conversion to floats: the product with V, and everything that does
// not depend on the product with K. decode_byte_lanes-inl.h and decode_word_lanes-inl.h have S^T = K Q^T.
//
// O += P V: P is rounded to int16 (int16_rows-inl.h), and pairs of keys are multiplied (decode_lane_values-inl.h). int4 adds P
// times its nibbles to -8 times the sum of P.
#pragma once

#include "decode_many_rows-inl.h"
#include "int16_rows-inl.h"
#include "softmax-inl.h"

// AVX-512 BF16 multiplies bytes of keys. AVX2 multiplies keys widened to int16. Other instruction sets have other forms.
#if defined(FA_DOT_BYTES) || (FA_VECTOR_BYTES == 32 && defined(FA_DOT_INT16))
#define FA_HAS_INTEGER_LANES
constexpr bool kHasIntegerLanes = true;
#else
constexpr bool kHasIntegerLanes = false;
#endif

// Whether products of rows as lanes exist for keys or values of a cache: int4 with one scale for each row, without zero points.
inline bool has_integer_lanes(const CacheParams& cache, const CacheGroups& groups) {
  return cache.dtype == CacheDType::kInt8 ||
         (cache.dtype == CacheDType::kInt4 && groups.count == 1 && !groups.zeros);
}
// Whether they exist for the keys of a call.
inline bool has_integer_keys(const AttentionParams& p) {
  const CacheParams& cache = p.varlen.cache;
  const int64_t columns_at_once = cache.dtype == CacheDType::kInt4 ? 32 : 16;
  return kHasIntegerLanes && has_integer_lanes(cache, cache.k_groups) &&
         p.sizes.head_dim % columns_at_once == 0;
}
// Whether they multiply the keys by `rows` rows of 16 bits.
inline bool multiplies_integer_lanes(const AttentionParams& p, int64_t rows) {
  constexpr int64_t kMostRows = 16;
  return has_integer_keys(p) && rows <= kMostRows && fills_lanes<float>(rows) &&
         uses_lane_blocks<float>(rows);
}
// Whether they also multiply the values.
inline bool multiplies_integer_values(const AttentionParams& p, int64_t rows) {
  const CacheParams& cache = p.varlen.cache;
  if (!multiplies_integer_lanes(p, rows) || !has_integer_lanes(cache, cache.v_groups)) return false;
  if (cache.dtype == CacheDType::kInt8) return true;
  // Each group of rows widens nibbles again. On AVX-512 BF16, several groups do not pay.
  return p.sizes.head_dim_v % (2 * kLanes<float>) == 0 && (FA_VECTOR_BYTES == 32 || rows <= kMostValueRows);
}

#if defined(FA_HAS_INTEGER_LANES)

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

struct IntegerLanes {
  static constexpr int64_t kMostBlocks = 2;

  int8_t* copy;  // [keys of a tile][bytes of a key or value]   only for pages of odd sizes, and the last keys
  Pair* probs;   // [block_k / 2][lanes]   P^T of a block of rows as int16
  float* factors;  // [heads][blocks][lanes]   of S^T: the scale of the scores, times the unit of each row
  int64_t cols, key_bytes, value_bytes;
  int planes;  // of columns: int4 has two, the even and the odd columns

  static IntegerLanes allocate(Arena& arena, const AttentionParams& p, int64_t heads, int64_t block_k) {
    IntegerLanes b{};
    b.cols = p.sizes.head_dim;
    b.planes = p.varlen.cache.dtype == CacheDType::kInt4 ? 2 : 1;
    b.key_bytes = b.cols / b.planes;
    b.value_bytes = p.sizes.head_dim_v / b.planes;
    const int64_t whole = ceil_div(block_k, kChunkRows) * kChunkRows;
    b.copy = arena.take<int8_t>(whole * std::max(b.key_bytes, b.value_bytes));
    b.probs = arena.take<Pair>(whole / 2 * kLanes<float>);
    b.factors = arena.take<float>(heads * kMostBlocks * kLanes<float>);
    return b;
  }

  // out += factor * P V for `keys` keys from all.first_key on. `v`: their chunks. `factors`: of each key; null: 1.
  template <class In>
  void add_values(const ManyRows<In, float>& many, const AllProbs<float>& all, float factor,
                  const float* factors, int64_t rows, const Rows<int8_t>* v, int64_t keys, float* out,
                  int64_t ldo, Prefetcher& ahead) const {
    for_each_lane_block<In, float>(rows, [&](int64_t first, int64_t count) {
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

#endif
