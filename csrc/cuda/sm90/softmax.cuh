// What a consumer thread does to its part of S between the two products. Its elements: see wgmma.h.
#pragma once

#include "../lanes.cuh"
#include "band.h"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// What makes a score of a product: times `scale`, or, where there is a softcap, tanh(product * to_tanh) * scale. The
// tanh then takes the product's place in an accumulator, and all else is the same.
struct ScoreScale {
  float to_tanh, scale, scale2;  // scale2: to scores in units of log2

  FA_HOST_DEVICE explicit ScoreScale(const AttentionParams& p)
      : to_tanh(static_cast<float>(p.softcap > 0 ? p.scale / p.softcap : 0)),
        scale(static_cast<float>(p.softcap > 0 ? p.softcap : p.scale)),
        scale2(static_cast<float>((p.softcap > 0 ? p.softcap : p.scale) * kLog2E)) {}

  // tanh by its definition, within 2^-22: of a score only the absolute error counts. tanh.approx is off by 2^-11, which a
  // softcap of 50 would make an error of 2 % in P.
  __device__ float tanh(float product) const {
    const float power = ptx::exp2_fast(product * to_tanh * static_cast<float>(2 * kLog2E));
    return fmaf(-2.0f, ptx::reciprocal_fast(1.0f + power), 1.0f);
  }
};

// Products become their tanh.
template <int kElements>
__device__ void cap(const ScoreScale& score, float (&s)[kElements]) {
#pragma unroll
  for (int n = 0; n < kElements; ++n) s[n] = score.tanh(s[n]);
}

// -inf where the band hides an element, or `attends` (key_mask.cuh). `query`: of the thread's two rows.
template <int kElements>
__device__ void hide_invisible(const ShortBand& band, const int (&query)[2], int first_key,
                               float (&s)[kElements], uint32_t attends = ~0u) {
  const int key = first_key + first_column_in_eight();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t seen = columns_between(band.begin(query[r]) - key, band.end(query[r]) - key) & attends;
#pragma unroll
    for (int n = 0; n < kElements / 4; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& element = s[4 * n + 2 * r + e];
        element = seen >> (2 * n + e) & 1 ? element : -kInf<float>;
      }
  }
}

// The running statistics of a thread's two rows. All threads of a row know its maximum, of the unscaled
// products; the sum is the thread's own share until the end.
struct RowStatistics {
  float max[2] = {-kInf<float>, -kInf<float>}, sum[2] = {0, 0};

  // Takes in a tile of S, which becomes P. What the rows have summed up so far is to be multiplied with
  // factor[r].
  template <int kElements>
  __device__ void update(float scale2, float (&s)[kElements], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float new_max = max[r];
#pragma unroll
      for (int n = 0; n < kElements / 4; ++n)
        new_max = fmaxf(new_max, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));  // a NaN never wins
      new_max = maximum_of_lanes<kRowLanes>(new_max);
      // A row with nothing visible so far: any finite reference makes 2^(-inf - reference) the 0 it should
      // be.
      const float reference = new_max == -kInf<float> ? 0.0f : new_max * scale2;
      factor[r] = ptx::exp2_fast(max[r] * scale2 - reference);
      max[r] = new_max;
      sum[r] *= factor[r];
#pragma unroll
      for (int n = 0; n < kElements / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& element = s[4 * n + 2 * r + e];
          element = ptx::exp2_fast(fmaf(element, scale2, -reference));
          sum[r] += element;
        }
    }
  }
};

template <int kElements>
__device__ void scale_rows(float (&o)[kElements], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kElements; ++n) o[n] *= factor[n / 2 % 2];
}

// P as the left operand of O += P V, 16 keys each.
template <class In, int kElements>
__device__ void round_weights(const float (&s)[kElements], uint32_t (&weights)[kElements / 8][4]) {
#pragma unroll
  for (int k = 0; k < kElements / 8; ++k)
#pragma unroll
    for (int n = 0; n < 4; ++n) weights[k][n] = ptx::pack<In>(s[8 * k + 2 * n], s[8 * k + 2 * n + 1]);
}

// Bits of all of them: 0 in the highest one, because P is never negative.
template <int kSteps>
__device__ uint32_t any_bits(const uint32_t (&weights)[kSteps][4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) bits |= weights[k][0] | weights[k][1] | weights[k][2] | weights[k][3];
  return bits;
}

}  // namespace flash_attn_ext::cuda::sm90
