// The two products of attention on integers, S^T = K Q^T and O += P V, in the register tiles of gemm-inl.h. The sums are
// exact on every instruction set, so the results do not depend on it.
#pragma once

#include "../vec/math-inl.h"
#include "tiling-inl.h"

// Operands are words of 32 bits: four int8 numbers or two int16 numbers, consecutive along the depth.

// scores[key][query] = k_factors[key] * q_factors[query] * <codes> + q_means[query]
struct Int8ScoreArgs {
  int64_t depth;                     // words of a row
  const uint32_t* k;                 // [keys][k_stride]   int8: codes + 128, unsigned
  int64_t k_stride;                  // words
  const float* k_factors;            // [keys]
  const uint32_t* q;                 // [depth][ld]
  const int32_t* q_starts;           // [ld]   start of each sum. int8: -128 * sum of q's codes
  const float *q_factors, *q_means;  // [ld]
  float* scores;                     // [keys][ld]
  int64_t ld;
};

// out[query][c] = out[query][c] * rescale[query] + prob_factors[query] * v_factors[c] * <codes>
struct Int8ValueArgs {
  int64_t depth;          // pairs of keys
  const uint32_t* probs;  // [depth][probs_ld]   pairs of int16
  int64_t probs_ld;
  const uint32_t* v;                    // [depth][ld]         pairs of int16
  const float* v_factors;               // [ld]
  const float *rescale, *prob_factors;  // [queries]
  float* out;                           // [queries][ld]
  int64_t ld;
};

typedef VecBits<float> Words32;
typedef VecIndex<float> Sums32;

// sum + the products of two pairs of int16.
struct DotOfPairs {
  static FA_INLINE Sums32 add(Sums32 sum, Words32 a, Words32 b) {
#if defined(FA_DOT_INT16_WORDS)
    return FA_DOT_INT16_WORDS(sum, a, b);
#elif defined(FA_MULTIPLY_INT16)
    return sum + FA_MULTIPLY_INT16(a, b);
#else
    const Sums32 x = (Sums32)a, y = (Sums32)b;
    return sum + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
  }
};

#if defined(FA_DOT_INT8_WORDS)
// sum + the products of four bytes, unsigned in a and signed in b.
struct DotOfBytes {
  static FA_INLINE Sums32 add(Sums32 sum, Words32 a, Words32 b) { return FA_DOT_INT8_WORDS(sum, a, b); }
};
using DotOfCodes = DotOfBytes;
constexpr bool kMultipliesBytes = true;
#else
using DotOfCodes = DotOfPairs;
constexpr bool kMultipliesBytes = false;
#endif

struct WordArgs {
  int64_t depth;
  const uint32_t* a;
  int64_t a_row, a_depth;
  const uint32_t* b;
  int64_t ldb;
};

FA_INLINE Words32 load_words(const uint32_t* p) {
  return (Words32)load<float>(reinterpret_cast<const float*>(p));
}

// Calls store(m, n, sum) for each vector of sums, from row m and column n on. start(n) is the first value of a sum.
template <class Dot, int MR, int NV, class Start, class Store>
FA_INLINE void word_register_tile(const WordArgs& g, int64_t m0, int64_t n0, const Start& start,
                                  const Store& store_sums) {
  constexpr int L = kLanes<float>;
  const uint32_t* a = g.a + m0 * g.a_row;
  const uint32_t* b = g.b + n0;
  Sums32 sum[MR][NV];
#pragma GCC unroll 4
  for (int n = 0; n < NV; ++n) {
    const Sums32 first = start(n0 + n * L);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) sum[m][n] = first;
  }
  for (int64_t k = 0; k < g.depth; ++k) {
    Words32 bv[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) bv[n] = load_words(b + n * L);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const Words32 av = Words32{} + a[m * g.a_row];
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[m][n] = Dot::add(sum[m][n], av, bv[n]);
    }
    a += g.a_depth;
    b += g.ldb;
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) store_sums(m0 + m, n0 + n * L, sum[m][n]);
}

template <class Dot, int MR, int NV, class Start, class Store>
inline void word_panel(const WordArgs& g, int64_t rows, int64_t n0, const Start& start,
                       const Store& store_sums) {
  int64_t m = 0;
  for (; m + MR <= rows; m += MR) word_register_tile<Dot, MR, NV>(g, m, n0, start, store_sums);
  if constexpr (MR > 4)
    for (; m + 4 <= rows; m += 4) word_register_tile<Dot, 4, NV>(g, m, n0, start, store_sums);
  for (; m < rows; ++m) word_register_tile<Dot, 1, NV>(g, m, n0, start, store_sums);
}

// `cols`: whole vectors.
template <class Dot, class Start, class Store>
inline void multiply_words(const WordArgs& g, int64_t rows, int64_t cols, const Start& start,
                           const Store& store_sums) {
  constexpr int L = kLanes<float>;
  int64_t vectors = cols / L, n = 0;
  if (vectors % 3 == 0)
    for (; vectors >= 3; vectors -= 3, n += 3 * L)
      word_panel<Dot, kRowsBy3, 3>(g, rows, n, start, store_sums);
  for (; vectors >= 2; vectors -= 2, n += 2 * L) word_panel<Dot, kRowsBy2, 2>(g, rows, n, start, store_sums);
  if (vectors == 1) word_panel<Dot, kRowsBy1, 1>(g, rows, n, start, store_sums);
}

inline void int8_scores(const Int8ScoreArgs& g, int64_t keys) {
  multiply_words<DotOfCodes>(
      {g.depth, g.k, g.k_stride, 1, g.q, g.ld}, keys, g.ld,
      [&](int64_t n)
          FA_INLINE_LAMBDA { return (Sums32)load_words(reinterpret_cast<const uint32_t*>(g.q_starts + n)); },
      [&](int64_t m, int64_t n, Sums32 sum) FA_INLINE_LAMBDA {
        const Vec<float> dot = __builtin_convertvector(sum, Vec<float>);
        store<float>(g.scores + m * g.ld + n,
                     dot * (load<float>(g.q_factors + n) * g.k_factors[m]) + load<float>(g.q_means + n));
      });
}

inline void int8_add_values(const Int8ValueArgs& g, int64_t queries) {
  multiply_words<DotOfPairs>(
      {g.depth, g.probs, 1, g.probs_ld, g.v, g.ld}, queries, g.ld,
      [](int64_t) FA_INLINE_LAMBDA { return Sums32{}; },
      [&](int64_t m, int64_t n, Sums32 sum) FA_INLINE_LAMBDA {
        float* to = g.out + m * g.ld + n;
        const Vec<float> dot = __builtin_convertvector(sum, Vec<float>);
        store<float>(
            to, load<float>(to) * g.rescale[m] + dot * (load<float>(g.v_factors + n) * g.prob_factors[m]));
      });
}
