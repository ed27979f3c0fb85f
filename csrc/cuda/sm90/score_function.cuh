// The score function of the user in the registers of the forward's consumers.
#pragma once

#include "mask_function.cuh"

namespace flash_attn_ext::cuda::sm90 {

// Moves elements 4 n + 4 to 4 n + 7 to element 4 n, and the first four to the end. Registers can only be indexed by
// constants. So a loop with long code works on the first four elements, and rotates all elements in each step.
template <int kElements>
__device__ void rotate_by_four(float (&x)[kElements]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float first = x[e];
#pragma unroll
    for (int n = e; n + 4 < kElements; n += 4) x[n] = x[n + 4];
    x[kElements - 4 + e] = first;
  }
}

// The arguments of a kernel with a function on scores.
struct ScoreArguments : FlexArguments {
  __device__ ScoredByFunctions hidden() const { return {{functions}}; }

  // Replaces products, or their tanh with a softcap, by the function's scores. Elements that are not in `shown` become
  // -inf without a call of the function. No product may run: ptxas would serialise all products.
  template <int kElements>
  __device__ void change_scores(const BlockRange& range, const int (&query)[2], int first_key,
                                const RowBits& shown, float (&s)[kElements]) const {
    const int key = first_key + first_column_in_eight();
#pragma unroll 1
    for (int n = 0; n < kElements / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = e / 2, column = 8 * n + e % 2;
        if (shown.rows[r] >> (2 * n + e % 2) & 1)
          s[e] = hidden().new_score({range.b, range.h, query[r], key + column, s[e] * score.scale, 0});
        else
          s[e] = -kInf<float>;
      }
      rotate_by_four(s);
    }
  }
};

template <>
struct ArgumentsOf<Form::kScores> {
  using Type = ScoreArguments;
};

}  // namespace flash_attn_ext::cuda::sm90
