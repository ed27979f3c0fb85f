// The two products of decode for at most 6 rows of Q and float8 keys and values, on AVX2, without a copy of the cache as bfloat16. The
// lanes are columns. 16 codes become bfloat16 by a shift and a mask:
//
//   e4m3   s eeee mmm  ->  s 0000eeee mmm0000     the value times 2^-120
//   e5m2   s eeeee mm  ->  s 000eeeee mm00000     the value times 2^-112
//
// The power of two is the difference of the exponents' biases. It is right for subnormal codes, too: they become subnormal numbers. So
// that no product is subnormal, a row of Q has its largest magnitude near 2^120 or 2^112, and P is multiplied by 2^40.
// A copy needs lookups for subnormal codes, a store and a load.
#pragma once

#include "decode_products-inl.h"
#include "decode_sums_of_columns-inl.h"
#include "int16_rows-inl.h"
#include "softmax-inl.h"

#if FA_VECTOR_BYTES == 32 && defined(FA_WIDEN_INT8)

// Widens 16 codes. kHasSpecial: some code may be NaN or Inf.
template <CacheDType dtype, bool kHasSpecial>
struct Float8Codes {
  typedef int16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  static constexpr bool kE4M3 = dtype == CacheDType::kFloat8E4M3;
  static constexpr int kShift = kE4M3 ? 4 : 5, kExponent = kE4M3 ? 120 : 112;
  static constexpr int16_t kMagnitude = 0x7f << kShift, kLeastSpecial = (kE4M3 ? 0x7f : 0x7c) << kShift,
                           kSign = -0x8000;

  // The even and the odd columns.
  FA_INLINE static void load(const int8_t* p, F32* columns) {
    Words words = (Words)FA_WIDEN_INT8(p) << kShift & int16_t(kMagnitude | kSign);
    if constexpr (kHasSpecial)  // e5m2: a mantissa of 0 is Inf
      words |= ((words & kMagnitude) >= kLeastSpecial) & int16_t(kE4M3 ? 0x7fc0 : 0x7f80);
    widen_pairs((U32)words, columns[0], columns[1]);
  }
  // Returns whether some code of `count` rows is NaN or Inf. Rows have whole vectors.
  FA_INLINE static bool has_special(const Rows<int8_t>& rows, int64_t count) {
    typedef uint8_t Codes __attribute__((vector_size(FA_VECTOR_BYTES)));
    typedef uint8_t UnalignedCodes __attribute__((vector_size(FA_VECTOR_BYTES), aligned(1), may_alias));
    Codes highest = {};
    for (int64_t n = 0; n < count; ++n) {
      const int8_t* row = rows.row(n);
      for (int64_t c = 0; c < rows.cols; c += FA_VECTOR_BYTES) {
        const Codes codes = *reinterpret_cast<const UnalignedCodes*>(row + c),
                    doubled = codes + codes;  // without the sign
        highest = doubled > highest ? doubled : highest;
      }
    }
    const VecBits<double> found = (VecBits<double>)(highest >= uint8_t(2 * (kLeastSpecial >> kShift)));
    return (found[0] | found[1] | found[2] | found[3]) != 0;
  }
};

// Returns how many keys score_float8() computes: their scores of R rows are one vector.
template <int R>
constexpr int kScoredKeys = kLanes<float> / (R == 3 ? 4 : R);

// scores[r][n] = factors * S of kScoredKeys keys from key j on. Keys past `keys` read the last key again. `room` scores are stored.
// `q`: [steps of 16 columns][R][even, odd columns][8].
template <class Codes, int R>
FA_NOINLINE void score_float8(const float* q, const Rows<int8_t>& k, int64_t j, int64_t keys, F32 factors,
                              float* scores, int64_t ld, int64_t room, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kScoredKeys<R>;
  constexpr int64_t kAtOnce = kBytesOfPrefetch / N;  // columns between prefetches
  F32 sum[N][R];
  const int8_t* key[N];
  load_key_addresses(k, j, keys, key);
#pragma GCC unroll 16
  for (int n = 0; n < N * R; ++n) sum[n / R][n % R] = F32{};
  for (int64_t c = 0; c < k.cols; c += 2 * L, q += 2 * R * L) {
    if (c % kAtOnce == 0) ahead.lines(lines_of<int8_t>(N * std::min<int64_t>(kAtOnce, k.cols - c)));
#pragma GCC unroll 4
    for (int n = 0; n < N; n += 2) {  // two keys share the loads of q
      F32 first[2], second[2];
      Codes::load(key[n] + c, first);
      Codes::load(key[n + 1] + c, second);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * R; ++i) {
        const F32 query = in_register(load<float>(q + i * L));
        sum[n][i / 2] = multiply_add(sum[n][i / 2], query, first[i % 2]);
        sum[n + 1][i / 2] = multiply_add(sum[n + 1][i / 2], query, second[i % 2]);
      }
    }
  }
  F32 each[L];
#pragma GCC unroll 8
  for (int i = 0; i < L; ++i) each[i] = i / N < R ? sum[i % N][i / N < R ? i / N : 0] : F32{};
  float lanes[L];
  store<float>(lanes, sum_each_by_parts<float>(each) * factors);
  store_scores<float, R, N>(lanes, scores, ld, room);
}

// sums[r][c] += sum_j P[r][j] V[j][c] for R rows and NV * 16 columns from c on. Sums have the even columns of 16, then the odd ones.
template <class Codes, int R, int NV>
FA_NOINLINE void add_float8_values(const float* probs, int64_t ld, const Rows<int8_t>& v, int64_t c,
                                   int64_t keys, float* sums, int64_t ldo, Prefetcher& ahead) {
  constexpr int L = kLanes<float>;
  constexpr int64_t kFewKeys = 4;  // between prefetches
  F32 sum[R][2 * NV];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < 2 * NV; ++n) sum[r][n] = load<float>(sums + r * ldo + c + n * L);
  const int8_t* row = v.data + c;
  const int64_t stride = v.stride;
  const auto add = [&](int64_t j) FA_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      F32 columns[2];
      Codes::load(row + n * 2 * L, columns);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const F32 prob = splat<float>(probs[r * ld + j]);
        sum[r][2 * n] = multiply_add(sum[r][2 * n], prob, columns[0]);
        sum[r][2 * n + 1] = multiply_add(sum[r][2 * n + 1], prob, columns[1]);
      }
    }
    row += stride;
  };
  int64_t j = 0;
  for (; j + kFewKeys <= keys; j += kFewKeys) {
    ahead.lines(lines_of<int8_t>(kFewKeys * NV * 2 * L));
#pragma GCC unroll 4
    for (int n = 0; n < kFewKeys; ++n) add(j + n);
  }
  if (j < keys) ahead.lines(lines_of<int8_t>((keys - j) * NV * 2 * L));
  for (; j < keys; ++j) add(j);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < 2 * NV; ++n) store<float>(sums + r * ldo + c + n * L, sum[r][n]);
}

struct DecodeFloat8 {
  // 4 rows at once: more have too many sums for the registers. 5 and 6 rows widen codes twice and take 0.84 and 0.95 of the time of a
  // copy, 8 rows 1.0 (Zen 3).
  static constexpr int64_t kMostRows = 6, kRowsAtOnce = 4;
  static constexpr float kOfProbs = 0x1p40f;  // P may be 2^64 with a unified maximum

  template <class T>
  static constexpr bool kExists = std::is_same_v<T, float>;

  float* q;        // [heads][score_float8()]
  float* factors;  // [heads][kMostRows]   the scale of the scores times the power of two of each row of q
  int8_t* copy;    // [kChunkRows][D or D_v]   only if rows come from pages of odd sizes
  int64_t cols;
  CacheDType dtype;

  static bool multiplies(const AttentionParams& p, int64_t rows) {
    const CacheDType dtype = p.varlen.cache.dtype;
    return (dtype == CacheDType::kFloat8E4M3 || dtype == CacheDType::kFloat8E5M2) && rows <= kMostRows &&
           p.sizes.head_dim % FA_VECTOR_BYTES == 0 && p.sizes.head_dim_v % FA_VECTOR_BYTES == 0;
  }

  static DecodeFloat8 allocate(Arena& arena, const AttentionParams& p, int64_t heads) {
    DecodeFloat8 b{};
    if (!multiplies(p, 1)) return b;
    b.dtype = p.varlen.cache.dtype;
    b.cols = p.sizes.head_dim;
    b.q = arena.take<float>(heads * kMostRows * b.cols);
    b.factors = arena.take<float>(heads * kMostRows);
    b.copy = arena.take<int8_t>(kChunkRows * std::max(b.cols, p.sizes.head_dim_v));
    return b;
  }

  // Loads row `r` of `rows` rows of the task's head `n`.
  template <class In>
  void load_query(int64_t n, int64_t r, int64_t rows, const In* from, float scale) const {
    constexpr int64_t L = kLanes<float>;
    const float largest = largest_magnitude(from, cols);
    // 0 if an element is not finite. Then the row of out is NaN.
    const int exponent = std::isfinite(largest) ? std::max(std::ilogb(largest), -126) : 0;
    factors[n * kMostRows + r] = scale * std::ldexp(1.0f, exponent);
    const int shift = exponent_of_codes() - exponent;  // may be above the largest exponent
    const float half = std::ldexp(1.0f, shift / 2), rest = std::ldexp(1.0f, shift - shift / 2);
    const int64_t first = r / kRowsAtOnce * kRowsAtOnce, together = std::min(kRowsAtOnce, rows - first);
    float* to = q + (n * kMostRows + first) * cols + (r - first) * 2 * L;
    for (int64_t c = 0; c < cols; c += 2 * L, to += together * 2 * L) {
      F32 even = load_columns<float>(from + c, L) * half * rest,
          odd = load_columns<float>(from + c + L, L) * half * rest;
      separate_lanes<float>(even, odd);
      store<float>(to, even);
      store<float>(to + L, odd);
    }
  }

  // S of the task's head `n`.
  void scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t keys, float* out, int64_t ld,
              int64_t room, Prefetcher& ahead) const {
    with_codes(k, keys, [&](auto codes) {
      for_some_rows(rows, ahead, [&](int64_t row, auto few, Prefetcher& own) {
        constexpr int R = few.value, N = kScoredKeys<R>;
        F32 of_lanes = {};
        for (int i = 0; i < kLanes<float>; ++i)
          of_lanes[i] = factors[n * kMostRows + row + std::min<int64_t>(i / N, R - 1)];
        for (int64_t j = 0; j < keys; j += N)
          score_float8<decltype(codes), R>(q + (n * kMostRows + row) * cols, k, j, keys, of_lanes,
                                           out + row * ld + j, ld, room - j, own);
      });
    });
  }

  void finish_probs(float* probs, int64_t count) const { multiply_row<float>(probs, kOfProbs, count); }

  // Adds `keys` values to the sums of `rows` rows. `probs`: after finish_probs().
  void add_values(const float* probs, int64_t ld, int64_t rows, const Rows<int8_t>& v, int64_t keys,
                  float* sums, int64_t ldo, Prefetcher& ahead) const {
    with_codes(v, keys, [&](auto codes) {
      for_some_rows(rows, ahead, [&](int64_t row, auto few, Prefetcher& own) {
        constexpr int R = few.value, kWide = R == 1 ? 4 : R == 2 ? 2 : 1;
        constexpr int64_t kCols = 2 * kLanes<float>;
        int64_t c = 0;
        for (; c + kWide * kCols <= v.cols; c += kWide * kCols)
          add_float8_values<decltype(codes), R, kWide>(probs + row * ld, ld, v, c, keys, sums + row * ldo,
                                                       ldo, own);
        for (; c < v.cols; c += kCols)
          add_float8_values<decltype(codes), R, 1>(probs + row * ld, ld, v, c, keys, sums + row * ldo, ldo,
                                                   own);
      });
    });
  }
  // out += the sums of a row, in the order of its columns.
  void add_sums(const float* sums, float* out, int64_t cols_v) const {
    constexpr int64_t L = kLanes<float>;
    const float factor = std::ldexp(1 / kOfProbs, exponent_of_codes());
    for (int64_t c = 0; c < cols_v; c += 2 * L) {
      F32 first = load<float>(sums + c), second = load<float>(sums + c + L);
      interleave_lanes<float>(first, second);
      store<float>(out + c, load<float>(out + c) + first * factor);
      store<float>(out + c + L, load<float>(out + c + L) + second * factor);
    }
  }

 private:
  using E4M3 = Float8Codes<CacheDType::kFloat8E4M3, false>;
  using E5M2 = Float8Codes<CacheDType::kFloat8E5M2, false>;

  int exponent_of_codes() const {
    return dtype == CacheDType::kFloat8E4M3 ? E4M3::kExponent : E5M2::kExponent;
  }
  // Calls body(Float8Codes) for the codes of some rows.
  template <class Body>
  void with_codes(const Rows<int8_t>& rows, int64_t count, const Body& body) const {
    if (dtype == CacheDType::kFloat8E4M3) {
      if (E4M3::has_special(rows, count)) return body(Float8Codes<CacheDType::kFloat8E4M3, true>{});
      return body(E4M3{});
    }
    if (E5M2::has_special(rows, count)) return body(Float8Codes<CacheDType::kFloat8E5M2, true>{});
    body(E5M2{});
  }
  // Calls body(first row, R, prefetcher) for at most kRowsAtOnce rows. Only the first ones prefetch.
  template <class Body>
  static void for_some_rows(int64_t rows, Prefetcher& ahead, const Body& body) {
    Prefetcher nothing;
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
      Prefetcher& own = row == 0 ? ahead : nothing;
      const int64_t count = std::min(kRowsAtOnce, rows - row);
      if (count == 1)
        body(row, std::integral_constant<int, 1>{}, own);
      else
        for_column_form<BFloat16>(count, [&](auto few) { body(row, few, own); });
    }
  }
};

#else

struct DecodeFloat8 {
  template <class T>
  static constexpr bool kExists = false;
  static bool multiplies(const AttentionParams&, int64_t) { return false; }
  static DecodeFloat8 allocate(Arena&, const AttentionParams&, int64_t) { return {}; }
};

#endif
