// The steps for a tile of scores in registers, between the two products: scores, softmax, and value rows that a product
// must not read.
#pragma once

#include "../lanes.cuh"
#include "../scores.cuh"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// The step that applies the factor product_scale(). Before the softmax, if softcap, ALiBi or a mask follow, or if the
// scale is negative. In these cases the largest product is not the largest score. Otherwise inside the exponent,
// without additional instructions. `changes_scores`: the user's function follows.
struct ScoreScale {
  bool is_first;
  float scale;

  __device__ explicit ScoreScale(const AttentionParams& p, bool changes_scores = false)
      : is_first(!is_positive(p.scale) || has_softcap(p) || p.alibi || p.mask || changes_scores),
        scale(product_scale<float>(p)) {}
  // For calls with is_plain().
  static __device__ ScoreScale in_exponent(const AttentionParams& p) {
    return {false, product_scale<float>(p)};
  }
  // The factors from the result of finish_scores() to scores, and to exponents of 2.
  __device__ float to_score() const { return is_first ? 1.0f : scale; }
  __device__ float to_exponent() const { return to_score() * static_cast<float>(kLog2E); }

 private:
  __device__ ScoreScale(bool is_first, float scale) : is_first(is_first), scale(scale) {}
};

// Hides the scores outside of the band and of the tensors. Calls mark(n, e, whether element e of accumulator n is shown).
// Faster than finish_scaled_score() for each element, because the limits of a row are computed once, in 32 bits.
template <int N, class ScorePosition, class Mark>
__device__ void hide_outside_band(const DiagonalBand& band, const ScorePosition& at, float (&scores)[N][4],
                                  const Mark& mark) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t first = at.key(0, 0), i = at.query(2 * r) + band.diagonal;
    const Range shown{i - band.left - first, smaller(i + band.right + 1, at.end_key(r)) - first};
    hide_outside_columns(r, shown, scores, [&](int n, int e) { return at.shows(n, e); }, mark);
  }
}

// The elements that attend. Bit 4 n + e: element e of accumulator n.
template <class Word = uint32_t>
struct AttendingBits {
  Word bits;
  __device__ bool operator()(int n, int e) const { return bits >> (4 * n + e) & 1; }
};

// The elements that hide_outside_band() shows.
template <int N, class ScorePosition>
__device__ auto attending_in_band(const DiagonalBand& band, const ScorePosition& at) {
  AttendingBits<std::conditional_t<(N > 8), uint64_t, uint32_t>> attends{};
  float ignored[N][4] = {};
  hide_outside_band(band, at, ignored, [&](int n, int e, bool shows) {
    attends.bits |= decltype(attends.bits){shows} << (4 * n + e);
  });
  return attends;
}

// Converts products to the softmax's input; hidden scores are -inf. Bit 4 n + e of the result: that element attends. A
// ScorePosition has the position of element e of accumulator n: batch(), head(e), query(e), key(n, e), inside(n, e). Its
// end_key(r) is the end of the keys of row r, and shows(n, e) is the answer of the user's mask function.
template <int N, class ScorePosition>
__device__ uint32_t finish_scores(const AttentionParams& p, const ScoreScale& scale, const ScorePosition& at,
                                  bool partial, float (&scores)[N][4]) {
  if (scale.is_first) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= scale.scale;
  }
  if (!has_softcap(p) && !p.alibi) {
    if (!partial) return ~uint32_t{0};
    constexpr bool kWide = N > 2;  // limits of rows do not pay for eight elements
    if (kWide && !p.mask) {
      uint32_t attends = 0;
      hide_outside_band(p.band.without_chunks(), at, scores,
                        [&](int n, int e, bool shows) { attends |= uint32_t{shows} << (4 * n + e); });
      return attends;
    }
  }

  static_assert(4 * N <= 32);
  uint32_t attends = 0;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Score<float> score = finish_scaled_score(p, scores[n][e], at.batch(), at.head(e), at.query(e),
                                                     at.key(n, e), at.inside(n, e));
      scores[n][e] = score.value;
      attends |= uint32_t{score.attends} << (4 * n + e);
    }
  return attends;
}

// The maximum of `max` and the scores in the thread's row r, which four lanes share.
template <int N>
__device__ float row_maximum(float max, const float (&scores)[N][4], int r) {
#pragma unroll
  for (int n = 0; n < N; ++n) max = larger(larger(max, scores[n][2 * r]), scores[n][2 * r + 1]);
  return maximum_of_lanes<kRowLanes>(max);
}

// Running statistics of the thread's two rows. The sum is over the thread's own elements until the end. The maximum is
// of finish_scores()'s results.
struct RowStatistics {
  float max[2] = {-kInf<float>, -kInf<float>}, sum[2] = {0, 0};

  // Converts scores to P. The caller multiplies the row's earlier results by factor[r].
  template <int N>
  __device__ void update(const ScoreScale& score_scale, float (&scores)[N][4], float (&factor)[2]) {
    const float scale = score_scale.to_exponent();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max = row_maximum(max[r], scores, r);
      // If no key is visible so far, P is 0.
      const float finite_max = new_max == -kInf<float> ? 0.0f : new_max;
      // The maximum is subtracted inside the exponent. If a mask may be finfo.min, it is subtracted before, because
      // finfo.min times log2(e) overflows.
      const float shift = score_scale.is_first ? finite_max : 0.0f, reference = (finite_max - shift) * scale;
      factor[r] = ptx::exp2_fast(fmaf(max[r] - shift, scale, -reference));
      sum[r] *= factor[r];
      if (score_scale.is_first) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) scores[n][e] -= shift;
      }
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e)
          sum[r] += scores[n][e] = ptx::exp2_fast(fmaf(scores[n][e], scale, -reference));
      max[r] = new_max;
    }
  }
};

// A hidden value must not reach a result, but in a matrix product 0 * NaN is NaN. So this function adds value rows with
// an Inf or NaN, only to results that attend to them. The caller then sets these rows to zero.
template <int N, int kColumns, class Attends, class Values, class IsFinite>
__device__ void add_non_finite_rows(float (&probs)[N][4], const Attends& attends, const Values& values,
                                    const IsFinite& is_finite, float (&acc)[kColumns][4]) {
  for_each_accumulator(probs, [&](int n, const float (&four)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll 1
      for (int t = 0; t < 4; ++t) {  // lane t of a row of four has probs 8 n + 2 t and 8 n + 2 t + 1
        const int row = 8 * n + 2 * t + e % 2, r = e / 2, owner = lane() / 4 * 4 + t;
        if (is_finite(row)) continue;
        const float prob = __shfl_sync(0xffffffffu, four[e], owner);
        const uint32_t attended = __shfl_sync(0xffffffffu, uint32_t{attends(n, e)}, owner);
        if (!attended) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          acc[c][2 * r] += prob * widen(values.at(row, 8 * c + lane() % 4 * 2));
          acc[c][2 * r + 1] += prob * widen(values.at(row, 8 * c + lane() % 4 * 2 + 1));
        }
      }
  });
}

}  // namespace flash_attn_ext::cuda::sm80
