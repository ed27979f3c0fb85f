// The score function of the user in the registers of the forward's consumers.
#pragma once

#include "../accumulators.cuh"
#include "mask_function.cuh"

namespace flash_attn_ext::cuda::sm90 {

// The arguments of a kernel with a function on scores.
struct ScoreArguments : FlexArguments {
  __device__ ScoredByFunctions hidden() const { return {{functions}}; }

  // Replaces products, or their tanh with a softcap, by the function's scores. Elements that are not in `shown` become
  // -inf without a call of the function. No product may run: ptxas would serialise all products.
  template <int kElements>
  __device__ void change_scores(const BlockRange& range, const int (&query)[2], int first_key,
                                const RowBits& shown, float (&s)[kElements]) const {
    const int key = first_key + first_column_in_eight();
    for_each_accumulator(as_accumulators(s), [&](int n, float (&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = e / 2, column = 8 * n + e % 2;
        if (shown.rows[r] >> (2 * n + e % 2) & 1)
          x[e] = hidden().new_score({range.b, range.h, query[r], key + column, x[e] * score.scale, 0});
        else
          x[e] = -kInf<float>;
      }
    });
  }
};

template <>
struct ArgumentsOf<Form::kScores> {
  using Type = ScoreArguments;
};

}  // namespace flash_attn_ext::cuda::sm90
