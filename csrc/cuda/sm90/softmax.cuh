// The softmax of a consumer thread's part of S, between the two products. See wgmma.h for the elements of a thread.
#pragma once

#include "../lanes.cuh"
#include "band.h"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// Converts products to scores: product * scale or, with a softcap, tanh(product * to_tanh) * scale. The tanh replaces
// the product in the accumulator.
struct ScoreScale {
  float to_tanh, scale, scale2;  // scale2: to scores in units of log2

  FA_HOST_DEVICE explicit ScoreScale(const AttentionParams& p)
      : to_tanh(static_cast<float>(p.softcap > 0 ? p.scale / p.softcap : 0)),
        scale(static_cast<float>(p.softcap > 0 ? p.softcap : p.scale)),
        scale2(static_cast<float>((p.softcap > 0 ? p.softcap : p.scale) * kLog2E)) {}

  // tanh by its definition, within 2^-22. Only the absolute error of a score matters. tanh.approx has an error of
  // 2^-11: a softcap of 50 would turn it into an error of 2% in P.
  __device__ float tanh(float product) const {
    const float power = ptx::exp2_fast(product * to_tanh * static_cast<float>(2 * kLog2E));
    return fmaf(-2.0f, ptx::reciprocal_fast(1.0f + power), 1.0f);
  }
};

// Replaces products by their tanh.
template <int kElements>
__device__ void cap(const ScoreScale& score, float (&s)[kElements]) {
#pragma unroll
  for (int n = 0; n < kElements; ++n) s[n] = score.tanh(s[n]);
}

// Which elements of a thread's two rows attend. Bit 2 n + e: the row's column 8 n + e. All rows may have the same bits.
struct RowBits {
  uint32_t rows[2];
};
__device__ inline uint32_t bits_of_row(uint32_t bits, int) { return bits; }
__device__ inline uint32_t bits_of_row(const RowBits& bits, int r) { return bits.rows[r]; }

// Sets an element to -inf if the band or `attends` (key_mask.h, mask_function.cuh) hides it. `query`: the queries of the
// thread's two rows.
template <int kElements, class Bits = uint32_t>
__device__ void hide_invisible(const ShortBand& band, const int (&query)[2], int first_key,
                               float (&s)[kElements], const Bits& attends = ~0u) {
  const int key = first_key + first_column_in_eight();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t seen =
        columns_between(band.begin(query[r]) - key, band.end(query[r]) - key) & bits_of_row(attends, r);
#pragma unroll
    for (int n = 0; n < kElements / 4; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& element = s[4 * n + 2 * r + e];
        element = seen >> (2 * n + e) & 1 ? element : -kInf<float>;
      }
  }
}

// The running statistics of a thread's two rows. All threads of a row have its maximum, of the unscaled products. The
// sum is over the thread's own elements until the end.
struct RowStatistics {
  float max[2] = {-kInf<float>, -kInf<float>}, sum[2] = {0, 0};

  // Converts a tile of S to 2^kExponent P and updates the statistics. The caller multiplies the row's sums so far by
  // factor[r]. kSubtractsFirst: before the factor scale2, because finfo.min, which a function may return, times scale2
  // overflows.
  template <int kExponent = 0, bool kSubtractsFirst = false, int kElements>
  __device__ void update(float scale2, float (&s)[kElements], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float new_max = max[r];
#pragma unroll
      for (int n = 0; n < kElements / 4; ++n)
        new_max =
            fmaxf(new_max, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));  // a NaN is never the maximum
      new_max = maximum_of_lanes<kRowLanes>(new_max);
      // If no key is visible so far, any finite reference works: 2^(-inf - reference) is 0.
      const float finite_max = new_max == -kInf<float> ? 0.0f : new_max;
      const float shift = kSubtractsFirst ? finite_max : 0.0f;
      const float reference = kSubtractsFirst ? 0.0f : finite_max * scale2;
      factor[r] = ptx::exp2_fast((max[r] - shift) * scale2 - reference);
      max[r] = new_max;
      sum[r] *= factor[r];
      const float subtracted = kExponent == 0 ? reference : reference - kExponent;
#pragma unroll
      for (int n = 0; n < kElements / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& element = s[4 * n + 2 * r + e];
          element = ptx::exp2_fast(fmaf(element - shift, scale2, -subtracted));
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

// Rounds P to left operands of O += P V, 16 keys each.
template <class In, int kElements>
__device__ void round_weights(const float (&s)[kElements], uint32_t (&weights)[kElements / 8][4]) {
#pragma unroll
  for (int k = 0; k < kElements / 8; ++k)
#pragma unroll
    for (int n = 0; n < 4; ++n) weights[k][n] = ptx::pack<In>(s[8 * k + 2 * n], s[8 * k + 2 * n + 1]);
}

// The OR of all bits. The highest bit is 0, because P is never negative.
template <int kSteps>
__device__ uint32_t any_bits(const uint32_t (&weights)[kSteps][4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) bits |= weights[k][0] | weights[k][1] | weights[k][2] | weights[k][3];
  return bits;
}

}  // namespace flash_attn_ext::cuda::sm90
