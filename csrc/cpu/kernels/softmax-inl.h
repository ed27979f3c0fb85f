// One step of the online softmax on a tile: replaces S by P = e^(S - m') and updates m and l of each row of Q. A row
// of Q is a lane of the tile, or a row in decode's form for few rows.
#pragma once

#include "../vec/math-inl.h"
#include "frame-inl.h"
#include "pairs-inl.h"
#include "tiles-inl.h"

// Returns the maximum of a column of vectors. Uses four chains, because in one chain each maximum would wait for the
// maximum before.
template <class T>
FA_INLINE Vec<T> max_of_column(const T* column, int64_t rows, int64_t ld) {
  Vec<T> chain[4];
  for (auto& m : chain) m = splat<T>(kNegInf<T>);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) chain[n] = max<T>(chain[n], load<T>(column + (r + n) * ld));
  for (; r < rows; ++r) chain[0] = max<T>(chain[0], load<T>(column + r * ld));
  return max<T>(max<T>(chain[0], chain[1]), max<T>(chain[2], chain[3]));
}

// Calls write(j, P of key j, P of key j + 1) for even j; a last single key comes with P = 0. Returns the sum of P.
template <class T, class Write, class Prob>
FA_INLINE Vec<T> write_probs(const Write& write, int64_t keys, const Prob& prob_of_key) {
  Vec<T> sum = {};
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    const Vec<T> first = prob_of_key(j), second = prob_of_key(j + 1);
    write(j, first, second);
    sum = sum + first + second;
  }
  if (j < keys) {
    const Vec<T> last = prob_of_key(j);
    write(j, last, Vec<T>{});
    sum += last;
  }
  return sum;
}

#if defined(FA_HAS_TILE_REGISTERS)

// 16 rows of pairs of keys: P of 16 rows of Q as the left operand of AMX.
struct PairRows {
  Pair* data;
  int64_t ld;
};

// Transposes P in registers, 32 keys at a time. Pads the last keys with zeros.
template <class T, class Prob>
FA_INLINE F32 write_probs(const PairRows& to, int64_t keys, const Prob& prob_of_key) {
  constexpr int L = kLanes<float>;
  F32 sum = {};
  for (int64_t j = 0; j < keys; j += 2 * L) {
    F32 block[L];
    const auto fill = [&](const auto& prob) FA_INLINE_LAMBDA {
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) {
        const F32 first = prob(j + 2 * n), second = prob(j + 2 * n + 1);
        block[n] = (F32)pair_up(first, second);
        sum = sum + first + second;
      }
    };
    if (j + 2 * L <= keys) {
      fill(prob_of_key);
    } else {
      fill([&](int64_t key) FA_INLINE_LAMBDA { return key < keys ? prob_of_key(key) : F32{}; });
    }
    transpose<float>(block);
#pragma GCC unroll 16
    for (int n = 0; n < L; ++n) store_elements(to.data + n * to.ld + j / 2, (U32)block[n]);
  }
  keep_product_unit_awake();
  return sum;
}

#endif

// Returns the function from a score S of a column to P = e^(scale (S - reference)), log2_scale = scale * log2(e).
template <class In, class T>
FA_INLINE auto probs_of_column(T* column, int64_t keys, int64_t ld, Vec<T> reference, T log2_scale) {
#if defined(FA_HAS_SCALEF)
  if constexpr (sizeof(In) == 2) {
    // One multiply-add: P = 2^(log2_scale S - shift). The rounding of `shift` multiplies all P of a row by the same
    // number, below 1 + 2^-15. In rows with a larger shift, scores become differences before. Other rows of the vector keep
    // their bits.
    constexpr float kMostShift = 1024;
    Vec<float> shift = reference * log2_scale;
    if (FA_ANY_ABOVE_PS(shift * shift, kMostShift * kMostShift)) {
      const auto is_large = shift * shift > kMostShift * kMostShift;
      const Vec<float> subtracted = is_large ? reference : Vec<float>{};
      for (int64_t j = 0; j < keys; ++j)
        store<float>(column + j * ld, load<float>(column + j * ld) - subtracted);
      shift = is_large ? Vec<float>{} : shift;
    }
    return [=](Vec<float> score) FA_INLINE_LAMBDA { return short_exp2(score * log2_scale - shift); };
  } else
#endif
    return [=](Vec<T> score) FA_INLINE_LAMBDA { return prob_exp<In, T>(score - reference, log2_scale); };
}

// The softmax of kLanes rows of Q: `column` has one vector per key, one lane per row of Q. probs_below(m') returns the
// function from a score to P = e^(S - m'). `unified` (or null) replaces m'. Sets `factor` = e^(m - m') by
// rescale_exp(x). rescale_exp(0) must be exactly 1, because an error would grow with every tile. `write` receives P:
// write_probs().
template <class T, class ProbsBelow, class RescaleExp, class Write>
FA_INLINE void softmax_column(const T* column, int64_t keys, int64_t ld, const T* unified, Vec<T>& row_max,
                              Vec<T>& row_sum, Vec<T>& factor, const ProbsBelow& probs_below,
                              const RescaleExp& rescale_exp, const Write& write) {
  const Vec<T> new_max = max<T>(row_max, max_of_column<T>(column, keys, ld));
  // No key visible yet: any finite reference gives e^(-inf - reference) = 0.
  const Vec<T> reference = unified ? splat<T>(*unified) : new_max == kNegInf<T> ? Vec<T>{} : new_max;
  const auto prob = probs_below(reference);
  const Vec<T> sum =
      write_probs<T>(write, keys, [&](int64_t j) FA_INLINE_LAMBDA { return prob(load<T>(column + j * ld)); });
  factor = unified ? splat<T>(T(1)) : rescale_exp(row_max - reference);
  row_sum = row_sum * factor + sum;
  row_max = new_max;
}

// The softmax of the forward's tile; scores are in units of `unit`. write_at(c) receives P of the rows from c on.
template <class In, class T, class WriteAt>
FA_INLINE void softmax_of_tile(const TileFrame& f, const KeyStairs& stairs, T unit, T* scores, T* row_max,
                               T* row_sum, T* rescale, const WriteAt& write_at) {
  const T log2_unit = unit * T(kLog2E);
  const auto rescale_exp = [&](Vec<T> x) FA_INLINE_LAMBDA { return exp_scaled<T>(x, log2_unit); };
  for (int64_t c = 0; c < f.ld; c += kLanes<T>) {
    const int64_t keys = stairs.keys_of(c);
    const auto probs_below = [&](Vec<T> reference) FA_INLINE_LAMBDA {
      return probs_of_column<In, T>(scores + c, keys, f.ld, reference, log2_unit);
    };
    Vec<T> m = load<T>(row_max + c), l = load<T>(row_sum + c), factor;
    softmax_column<T>(scores + c, keys, f.ld, nullptr, m, l, factor, probs_below, rescale_exp, write_at(c));
    store<T>(row_max + c, m);
    store<T>(row_sum + c, l);
    store<T>(rescale + c, factor);
  }
}

// Replaces S by P. `In`: the type of q, k, v. P is as exact as products of this type require.
template <class T, class In = T>
inline void online_softmax(const TileFrame& f, const KeyStairs& stairs, T unit, T* scores, T* row_max,
                           T* row_sum, T* rescale) {
  softmax_of_tile<In, T>(f, stairs, unit, scores, row_max, row_sum, rescale, [&](int64_t c) FA_INLINE_LAMBDA {
    return [&f, column = scores + c](int64_t j, Vec<T> first, Vec<T> second) FA_INLINE_LAMBDA {
      store<T>(column + j * f.ld, first);
      if (j + 1 < f.keys) store<T>(column + (j + 1) * f.ld, second);
    };
  });
}

#if defined(FA_DOT_BFLOAT16)

// Writes P as probs_operand(probs, ...), rounded to bfloat16. The sum is of P before rounding.
inline void softmax_to_pairs(const TileFrame& f, const KeyStairs& stairs, float unit, float* scores,
                             Pair* probs, float* row_max, float* row_sum, float* rescale) {
  const LeftPairs layout = probs_operand(probs, f.keys, f.ld);
  const auto write_at = [&](int64_t c) FA_INLINE_LAMBDA {
#if defined(FA_HAS_TILE_REGISTERS)
    return PairRows{probs + c * layout.row, layout.row};
#else
    return [to = probs + c, depth = layout.depth](int64_t j, F32 first, F32 second)
               FA_INLINE_LAMBDA { store_elements(to + j / 2 * depth, pair_up(first, second)); };
#endif
  };
  softmax_of_tile<BFloat16, float>(f, stairs, unit, scores, row_max, row_sum, rescale, write_at);
}

#endif

template <class T>
inline void multiply_row(T* row, T factor, int64_t ld) {
  for (int64_t c = 0; c < ld; c += kLanes<T>) store<T>(row + c, load<T>(row + c) * factor);
}

// The softmax of one row of a tile: writes P = e^(S - m'), updates m and l, and rescales O. `unified` (or null)
// replaces m'.
template <class T>
inline void decode_softmax_row(T* scores, int64_t ld, const T* unified, T& row_max, T& row_sum, T* out,
                               int64_t d_v) {
  constexpr int L = kLanes<T>;
  Vec<T> highest = splat<T>(row_max);
  for (int64_t c = 0; c < ld; c += L) highest = max<T>(highest, load<T>(scores + c));
  const T new_max = max_lanes<T>(highest);
  const T reference = unified ? *unified : new_max == kNegInf<T> ? T(0) : new_max;
  Vec<T> sum = {};
  for (int64_t c = 0; c < ld; c += L) {
    const Vec<T> prob = exp<T>(load<T>(scores + c) - reference);
    store<T>(scores + c, prob);
    sum += prob;
  }
  const T factor = unified ? T(1) : exp<T>(splat<T>(row_max - reference))[0];
  row_sum = row_sum * factor + sum_lanes<T>(sum);
  row_max = new_max;
  if (factor != T(1)) multiply_row<T>(out, factor, d_v);
}

// The softmax of several rows: a vector of rows at once, with their maxima and sums as lanes, then the remaining rows
// one by one.
template <class T>
inline void decode_softmax_rows(T* scores, int64_t ld, int64_t rows, const T* unified, T* row_max, T* row_sum,
                                T* out, int64_t d_v) {
  constexpr int L = kLanes<T>;
  int64_t row = 0;
  for (; row + L <= rows; row += L) {
    T* block = scores + row * ld;
    Vec<T> each[L];
    for (int r = 0; r < L; ++r) {
      each[r] = load<T>(block + r * ld);
      for (int64_t c = L; c < ld; c += L) each[r] = max<T>(each[r], load<T>(block + r * ld + c));
    }
    const Vec<T> old_max = load<T>(row_max + row), new_max = max<T>(old_max, max_each<T>(each));
    const Vec<T> reference = unified ? splat<T>(*unified) : new_max == kNegInf<T> ? Vec<T>{} : new_max;
    const Vec<T> factor = unified ? splat<T>(T(1)) : exp<T>(old_max - reference);
    T references[L], factors[L];
    store<T>(references, reference);
    store<T>(factors, factor);
    for (int r = 0; r < L; ++r) {
      const Vec<T> own = splat<T>(references[r]);
      Vec<T> sum = {};
      for (int64_t c = 0; c < ld; c += L) {
        const Vec<T> prob = exp<T>(load<T>(block + r * ld + c) - own);
        store<T>(block + r * ld + c, prob);
        sum += prob;
      }
      each[r] = sum;
    }
    store<T>(row_sum + row, load<T>(row_sum + row) * factor + sum_each<T>(each));
    store<T>(row_max + row, new_max);
    for (int r = 0; r < L; ++r)
      if (factors[r] != T(1)) multiply_row<T>(out + (row + r) * d_v, factors[r], d_v);
  }
  for (; row < rows; ++row)
    decode_softmax_row<T>(scores + row * ld, ld, unified, row_max[row], row_sum[row], out + row * d_v, d_v);
}

// Writes vectors of P of decode's tile in place of S: write_probs().
template <class T>
struct ProbsInPlace {
  T* data;
  int64_t ld, vectors;  // the distance of vectors, and their number
  FA_INLINE void operator()(int64_t n, Vec<T> first, Vec<T> second) const {
    store<T>(data + n * ld, first);
    if (n + 1 < vectors) store<T>(data + (n + 1) * ld, second);
  }
};

// The softmax of decode's tile S^T, [keys][lanes], for `rows` <= lanes < a vector. A vector has lanes of several keys.
// `write` receives P by vectors. P of the padding up to `padded_keys`, whole vectors, is 0. `In`: the type of q, k, v.
template <class In, class T, class Write>
inline void decode_softmax_part_of_vector(T* scores, int64_t keys, int64_t padded_keys, int64_t lanes,
                                          const T* unified, T* row_max, T* row_sum, int64_t rows, T* out,
                                          int64_t d_v, const Write& write) {
  constexpr int L = kLanes<T>;
  const int64_t vectors = padded_keys * lanes / L;
  std::fill(scores + keys * lanes, scores + padded_keys * lanes, kNegInf<T>);
  T old_max[L], factors[L], sums[L], maxima[L];
  for (int64_t i = 0; i < L; ++i) {
    const int64_t row = i & (lanes - 1);  // `lanes` is a power of two, and a 64-bit division takes 40 cycles
    old_max[i] = row < rows ? row_max[row] : kNegInf<T>;
  }
  Vec<T> new_max = max<T>(load<T>(old_max), max_of_column<T>(scores, vectors, L));
#pragma GCC unroll 8
  for (int d = L / 2; d > 0; d /= 2)
    if (d >= lanes) new_max = max<T>(new_max, rotate<T>(new_max, d));
  const Vec<T> reference = unified ? splat<T>(*unified) : new_max == kNegInf<T> ? Vec<T>{} : new_max;
  const auto prob = probs_of_column<In, T>(scores, vectors, L, reference, T(kLog2E));
  Vec<T> sum = write_probs<T>(write, vectors,
                              [&](int64_t n) FA_INLINE_LAMBDA { return prob(load<T>(scores + n * L)); });
#pragma GCC unroll 8
  for (int d = L / 2; d > 0; d /= 2)
    if (d >= lanes) sum += rotate<T>(sum, d);
  store<T>(factors, unified ? splat<T>(T(1)) : exp<T>(load<T>(old_max) - reference));
  store<T>(sums, sum);
  store<T>(maxima, new_max);
  for (int64_t r = 0; r < rows; ++r) {
    row_sum[r] = row_sum[r] * factors[r] + sums[r];
    row_max[r] = maxima[r];
    if (old_max[r] != kNegInf<T> && factors[r] != T(1))  // otherwise O is 0
      multiply_row<T>(out + r * d_v, factors[r], d_v);
  }
}

// The softmax of decode's tile S^T, [keys][lanes]: a row of Q is a lane, so no vector is split. Writes O's factors to
// `rescale`, because the next product multiplies O by these factors. write_at(row) receives P of the rows from `row` on.
template <class In, class T, class WriteAt>
inline void decode_softmax_lanes(T* scores, int64_t keys, int64_t lanes, const T* unified, T* row_max,
                                 T* row_sum, int64_t rows, T* rescale, const WriteAt& write_at) {
  constexpr int L = kLanes<T>;
  const auto e_to = [](Vec<T> x) FA_INLINE_LAMBDA { return exp<T>(x); };
  for (int64_t row = 0; row < rows; row += L) {
    const int64_t count = std::min<int64_t>(L, rows - row);
    Vec<T> m = load_columns<T>(row_max + row, count), l = load_columns<T>(row_sum + row, count), factor;
    const auto probs_below = [&](Vec<T> reference) FA_INLINE_LAMBDA {
      return probs_of_column<In, T>(scores + row, keys, lanes, reference, T(kLog2E));
    };
    softmax_column<T>(scores + row, keys, lanes, unified, m, l, factor, probs_below, e_to, write_at(row));
    store_columns<T>(row_max + row, m, count);
    store_columns<T>(row_sum + row, l, count);
    store<T>(rescale + row, factor);
  }
}
