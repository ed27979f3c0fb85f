// The two products of decode for at most 6 rows of Q and float8 keys and values, on AVX2, without a copy of the cache as bfloat16. The
// lanes are columns. 16 codes become bfloat16 by a shift and a mask:
//
//   e4m3   s eeee mmm  ->  s 0000eeee mmm0000     the value times 2^-120
//   e5m2   s eeeee mm  ->  s 000eeeee mm00000     the value times 2^-112
//
// The power of two is the difference of the exponents' biases. It is right for subnormal codes, too: they become subnormal numbers. So
// that no product is subnormal, a row of Q has its largest magnitude near 2^120 or 2^112, and P is multiplied by 2^40.
// A copy needs lookups for subnormal codes, a store and a load.
//
// NaN and Inf need more instructions. So a product first widens all codes as numbers and keeps the highest magnitude. Only if it was NaN
// or Inf, the product runs again. A search before the product read each row of V twice from L2: with it, calls take 1.12 of the time with
// one query, and 1.0 to 1.03 with 4.
#pragma once

#include "decode_products-inl.h"
#include "decode_sums_of_columns-inl.h"
#include "int16_rows-inl.h"
#include "softmax-inl.h"

#if FA_VECTOR_BYTES == 32 && defined(FA_WIDEN_INT8)

// The power of two of a widened code.
constexpr int exponent_of_float8(CacheDType dtype) { return dtype == CacheDType::kFloat8E4M3 ? 120 : 112; }

// Parts of the columns in memory for `rows` rows at once, as in Float8Codes. With 4, a code takes fewer instructions, but more registers.
constexpr int parts_of_float8(int64_t rows) { return rows <= 2 ? 4 : 2; }

// Widens 8 * kParts codes at a time. With kHasSpecial, codes may be NaN or Inf. Without it, NaN and Inf become numbers, and
// found_special() returns whether one was among the codes.
template <CacheDType dtype, int kParts, bool kHasSpecial>
class Float8Codes {
  typedef int16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef uint8_t Bytes __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef Bytes UnalignedBytes __attribute__((aligned(1), may_alias));
  static constexpr bool kE4M3 = dtype == CacheDType::kFloat8E4M3;
  static constexpr int kShift = kE4M3 ? 4 : 5;
  static constexpr int16_t kMagnitude = 0x7f << kShift, kLeastSpecial = (kE4M3 ? 0x7f : 0x7c) << kShift,
                           kSign = -0x8000;
  // see() has the bytes of codes with 4 parts, and with 2 parts the words that codes become.
  using Element = std::conditional_t<kParts == 4, uint8_t, uint16_t>;
  typedef Element Seen __attribute__((vector_size(FA_VECTOR_BYTES)));

 public:
  // columns[n]: the columns n, n + kParts, n + 2 * kParts, ...
  FA_INLINE void load(const int8_t* p, F32* columns) {
    if constexpr (kParts == 2) {
      const Words words = bfloat16((Words)FA_WIDEN_INT8(p) << kShift);
      if (!kHasSpecial) see((Seen)words);
      widen_pairs((U32)words, columns[0], columns[1]);
    } else {
      static_assert(kParts == 4);
      const Bytes bytes = *reinterpret_cast<const UnalignedBytes*>(p);
      if (!kHasSpecial) see(bytes);
      const Words odd = (Words)bytes, even = odd << 8;  // the code is the upper byte of a word
      widen_pairs((U32)bfloat16(even >> (8 - kShift)), columns[0], columns[2]);
      widen_pairs((U32)bfloat16(odd >> (8 - kShift)), columns[1], columns[3]);
    }
  }
  FA_INLINE bool found_special() const {
    constexpr Element kLeast = kParts == 4 ? kLeastSpecial >> kShift : kLeastSpecial;
    const VecBits<double> found = (VecBits<double>)(highest_ >= Element(2 * kLeast));
    return (found[0] | found[1] | found[2] | found[3]) != 0;
  }

 private:
  // `words`: the sign in the highest bit, and the other bits in their places of a bfloat16.
  FA_INLINE static Words bfloat16(Words words) {
    words &= int16_t(kMagnitude | kSign);
    if constexpr (kHasSpecial)  // e5m2: a mantissa of 0 is Inf
      words |= ((words & kMagnitude) >= kLeastSpecial) & int16_t(kE4M3 ? 0x7fc0 : 0x7f80);
    return words;
  }
  FA_INLINE void see(Seen codes) {
    const Seen doubled = codes + codes;  // without the sign
    highest_ = doubled > highest_ ? doubled : highest_;
  }

  Seen highest_ = {};
};

// Returns how many keys score_float8() computes: their scores of R rows are one vector.
template <int R>
constexpr int kScoredKeys = kLanes<float> / (R == 3 ? 4 : R);

// scores[r][j] = factors * S[r][j] for `keys` keys, kScoredKeys at a time. A row has room for `room` scores: scores after the last key
// change, too. `q`: [steps of 8 * kParts columns][R][parts][8]. Without kHasSpecial, it returns whether a code is NaN or Inf. Then the
// scores are wrong.
template <CacheDType dtype, int R, bool kHasSpecial>
FA_NOINLINE bool score_float8(const float* q, const Rows<int8_t>& k, int64_t keys, F32 factors, float* scores,
                              int64_t ld, int64_t room, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kScoredKeys<R>, kParts = parts_of_float8(R);
  constexpr int64_t kAtOnce = kBytesOfPrefetch / N;  // columns between prefetches
  Float8Codes<dtype, kParts, kHasSpecial> codes;
  for (int64_t j = 0; j < keys; j += N) {
    F32 sum[N][R];
    const int8_t* key[N];
    load_key_addresses(k, j, keys, key);
#pragma GCC unroll 16
    for (int n = 0; n < N * R; ++n) sum[n / R][n % R] = F32{};
    const float* step = q;
    for (int64_t c = 0; c < k.cols; c += kParts * L, step += kParts * R * L) {
      if (c % kAtOnce == 0) ahead.lines(lines_of<int8_t>(N * std::min<int64_t>(kAtOnce, k.cols - c)));
#pragma GCC unroll 4
      for (int n = 0; n < N; n += 2) {  // two keys share the loads of q
        F32 first[kParts], second[kParts];
        codes.load(key[n] + c, first);
        codes.load(key[n + 1] + c, second);
#pragma GCC unroll 8
        for (int i = 0; i < kParts * R; ++i) {
          const F32 query = in_register(load<float>(step + i * L));
          sum[n][i / kParts] = multiply_add(sum[n][i / kParts], query, first[i % kParts]);
          sum[n + 1][i / kParts] = multiply_add(sum[n + 1][i / kParts], query, second[i % kParts]);
        }
      }
    }
    F32 each[L];
#pragma GCC unroll 8
    for (int i = 0; i < L; ++i) each[i] = i / N < R ? sum[i % N][i / N < R ? i / N : 0] : F32{};
    float lanes[L];
    store<float>(lanes, sum_each_by_parts<float>(each) * factors);
    store_scores<float, R, N>(lanes, scores + j, ld, room - j);
  }
  return codes.found_special();
}

// sums[r][c] += sum_j P[r][j] V[j][c] for R rows and NV steps of 8 * kParts columns from c on. Sums have the parts of a step one after
// the other. Without kHasSpecial, it returns whether a code is NaN or Inf. Then the sums do not change.
template <CacheDType dtype, int R, int NV, bool kHasSpecial>
FA_NOINLINE bool add_float8_values(const float* probs, int64_t ld, const Rows<int8_t>& v, int64_t c,
                                   int64_t keys, float* sums, int64_t ldo, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, kParts = parts_of_float8(R);
  constexpr int64_t kFewKeys = R >= 3 ? 8 : 4;  // between prefetches
  Float8Codes<dtype, kParts, kHasSpecial> codes;
  F32 sum[R][kParts * NV];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kParts * NV; ++n) sum[r][n] = load<float>(sums + r * ldo + c + n * L);
  const int8_t* row = v.data + c;
  const int64_t stride = v.stride;
  const auto add = [&](int64_t j) FA_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      F32 columns[kParts];
      codes.load(row + n * kParts * L, columns);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const F32 prob = splat<float>(probs[r * ld + j]);
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i)
          sum[r][n * kParts + i] = multiply_add(sum[r][n * kParts + i], prob, columns[i]);
      }
    }
    row += stride;
  };
  int64_t j = 0;
  for (; j + kFewKeys <= keys; j += kFewKeys) {
    ahead.lines(lines_of<int8_t>(kFewKeys * NV * kParts * L));
#pragma GCC unroll 8
    for (int n = 0; n < kFewKeys; ++n) add(j + n);
  }
  if (j < keys) ahead.lines(lines_of<int8_t>((keys - j) * NV * kParts * L));
  for (; j < keys; ++j) add(j);
  if (codes.found_special()) return true;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kParts * NV; ++n) store<float>(sums + r * ldo + c + n * L, sum[r][n]);
  return false;
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
    const int shift = exponent_of_float8(dtype) - exponent;  // may be above the largest exponent
    const float half = std::ldexp(1.0f, shift / 2), rest = std::ldexp(1.0f, shift - shift / 2);
    const int64_t first = r / kRowsAtOnce * kRowsAtOnce, together = std::min(kRowsAtOnce, rows - first);
    with_parts(together, [&](auto parts) {
      constexpr int kParts = parts.value;
      float* to = q + (n * kMostRows + first) * cols + (r - first) * kParts * L;
      for (int64_t c = 0; c < cols; c += kParts * L, to += together * kParts * L) {
        F32 part[kParts];
        for (int i = 0; i < kParts; ++i) part[i] = load_columns<float>(from + c + i * L, L) * half * rest;
        separate_parts(part);
        for (int i = 0; i < kParts; ++i) store<float>(to + i * L, part[i]);
      }
    });
  }

  // S of the task's head `n`.
  void scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t keys, float* out, int64_t ld,
              int64_t room, Prefetcher& ahead) const {
    for_some_rows(rows, ahead, [&](int64_t row, auto few, Prefetcher& own) {
      constexpr int R = few.value, N = kScoredKeys<R>;
      F32 of_lanes = {};
      for (int i = 0; i < kLanes<float>; ++i)
        of_lanes[i] = factors[n * kMostRows + row + std::min<int64_t>(i / N, R - 1)];
      with_codes(own, [&](auto codes, auto special, Prefetcher& lines) {
        return score_float8<codes.value, R, special.value>(q + (n * kMostRows + row) * cols, k, keys,
                                                           of_lanes, out + row * ld, ld, room, lines);
      });
    });
  }

  void finish_probs(float* probs, int64_t count) const { multiply_row<float>(probs, kOfProbs, count); }

  // Adds `keys` values to the sums of `rows` rows. `probs`: after finish_probs().
  void add_values(const float* probs, int64_t ld, int64_t rows, const Rows<int8_t>& v, int64_t keys,
                  float* sums, int64_t ldo, Prefetcher& ahead) const {
    for_some_rows(rows, ahead, [&](int64_t row, auto few, Prefetcher& own) {
      constexpr int R = few.value, kSteps = R == 1 ? 2 : 1;
      constexpr int64_t kCols = parts_of_float8(R) * kLanes<float>;
      const auto add = [&](int64_t c, auto steps) {
        with_codes(own, [&](auto codes, auto special, Prefetcher& lines) {
          return add_float8_values<codes.value, R, steps.value, special.value>(
              probs + row * ld, ld, v, c, keys, sums + row * ldo, ldo, lines);
        });
      };
      int64_t c = 0;
      for (; c + kSteps * kCols <= v.cols; c += kSteps * kCols) add(c, std::integral_constant<int, kSteps>{});
      for (; c < v.cols; c += kCols) add(c, std::integral_constant<int, 1>{});
    });
  }
  // out += the sums of row `r` of `rows` rows, in the order of its columns.
  void add_sums(const float* sums, int64_t r, int64_t rows, float* out, int64_t cols_v) const {
    constexpr int64_t L = kLanes<float>;
    const float factor = std::ldexp(1 / kOfProbs, exponent_of_float8(dtype));
    with_parts(std::min(kRowsAtOnce, rows - r / kRowsAtOnce * kRowsAtOnce), [&](auto parts) {
      constexpr int kParts = parts.value;
      for (int64_t c = 0; c < cols_v; c += kParts * L) {
        F32 part[kParts];
        for (int i = 0; i < kParts; ++i) part[i] = load<float>(sums + c + i * L);
        join_parts(part);
        for (int i = 0; i < kParts; ++i) {
          float* to = out + c + i * L;
          store<float>(to, load<float>(to) + part[i] * factor);
        }
      }
    });
  }

 private:
  // Calls body(dtype, kHasSpecial, prefetcher), and again with kHasSpecial if it returns true. Only the first call prefetches.
  template <class Body>
  FA_INLINE void with_codes(Prefetcher& ahead, const Body& body) const {
    const auto with = [&](auto codes) FA_INLINE_LAMBDA {
      if (!body(codes, std::false_type{}, ahead)) return;
      Prefetcher nothing;
      body(codes, std::true_type{}, nothing);
    };
    if (dtype == CacheDType::kFloat8E4M3)
      with(std::integral_constant<CacheDType, CacheDType::kFloat8E4M3>{});
    else
      with(std::integral_constant<CacheDType, CacheDType::kFloat8E5M2>{});
  }
  // Calls body(parts_of_float8()) for `rows` rows at once.
  template <class Body>
  static void with_parts(int64_t rows, const Body& body) {
    if (parts_of_float8(rows) == 4)
      body(std::integral_constant<int, 4>{});
    else
      body(std::integral_constant<int, 2>{});
  }
  // From the columns in order to parts as in Float8Codes, and back.
  static void separate_parts(F32 (&part)[2]) { separate_lanes<float>(part[0], part[1]); }
  static void separate_parts(F32 (&part)[4]) {
    separate_lanes<float>(part[0], part[1]);
    separate_lanes<float>(part[2], part[3]);
    separate_lanes<float>(part[0], part[2]);
    separate_lanes<float>(part[1], part[3]);
  }
  static void join_parts(F32 (&part)[2]) { interleave_lanes<float>(part[0], part[1]); }
  static void join_parts(F32 (&part)[4]) {
    interleave_lanes<float>(part[0], part[2]);
    interleave_lanes<float>(part[1], part[3]);
    interleave_lanes<float>(part[0], part[1]);
    interleave_lanes<float>(part[2], part[3]);
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
