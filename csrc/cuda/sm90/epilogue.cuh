// From accumulators to out and lse.
#pragma once

#include "../lanes.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

// One row by the definition, by a warp. A weight 0 of a masked key times a NaN or Inf in its value row is
// NaN; here what is masked is not read.
template <class In, int kHeadDim>
__device__ void attend_alone(const AttentionParams& p, int64_t b, int64_t h, int64_t i, float scale2) {
  constexpr int kColumns = kHeadDim / 32;
  const int64_t h_kv = p.sizes.kv_head(h);
  const int lane = threadIdx.x % 32;
  const In* q = p.q.row<In>(b, h, i);
  float max = -kInf<float>, sum = 0, out[kColumns] = {};
  const Range seen = visible_keys(p.band, i, i + 1, p.sizes.seqlen_k);
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const In *k = p.k.row<In>(b, h_kv, j), *v = p.v.row<In>(b, h_kv, j);
    float product = 0;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) product += widen(q[lane + 32 * n]) * widen(k[lane + 32 * n]);
    product = total_of_lanes<32>(product);
    const float new_max = fmaxf(max, product), reference = new_max == -kInf<float> ? 0.0f : new_max * scale2;
    const float factor = ptx::exp2_fast(max * scale2 - reference);
    const float weight = ptx::exp2_fast(product * scale2 - reference);
    max = new_max;
    sum = sum * factor + weight;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) out[n] = out[n] * factor + weight * widen(v[lane + 32 * n]);
  }
  const float factor = finish_row(max * scale2, sum).out_factor;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) p.out.row<In>(b, h, i)[lane + 32 * n] = round_to<In>(out[n] * factor);
}

// Writes a warp's 16 rows, as far as they exist.
template <class In, int kHeadDim>
__device__ void finish_rows(const AttentionParams& p, int64_t b, int64_t h, int64_t warp_row, float scale2,
                            const RowStatistics& statistics, float (&o)[kHeadDim / 2]) {
  const Sizes& z = p.sizes;
  RowResult<float> results[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    results[r] = finish_row(statistics.max[r] * scale2, row_total(statistics.sum[r]));
  const float factors[2] = {results[0].out_factor, results[1].out_factor};
  scale_rows(o, factors);

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t i = warp_row + first_row_in_warp() + 8 * r;
    if (i < z.seqlen_q && first_column_in_eight() == 0)
      static_cast<float*>(p.lse)[(b * z.heads + h) * z.seqlen_q + i] = results[r].lse;
  }
  const uint32_t nan_rows = rows_with_nan(o);
  store_rows<In>(p.out, b, h, warp_row, z.seqlen_q, nan_rows, o);
#pragma unroll 1
  for (int n = 0; n < kWarpRows; ++n)
    if ((nan_rows >> n & 1) && warp_row + n < z.seqlen_q)
      attend_alone<In, kHeadDim>(p, b, h, warp_row + n, scale2);
}

}  // namespace flash_attn_ext::cuda::sm90
