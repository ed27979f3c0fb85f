// From accumulators to out and lse.
#pragma once

#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kWarpRows = 16;

// Thread t of four holds x[n] = element (n, t) of a 4 x 4 matrix; then x[n] = element (t, n).
__device__ inline void transpose_in_four(uint32_t (&x)[4]) {
#pragma unroll
  for (int side = 1; side <= 2; side *= 2) {
    const bool upper = threadIdx.x & side;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & side) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + side], side);
      if (upper) {
        x[n] = received;
      } else {
        x[n + side] = received;
      }
    }
  }
}

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
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) product += __shfl_xor_sync(0xffffffffu, product, lanes);
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

  // Bit n: row n of the warp holds a NaN, rightly or because of a masked key.
  uint32_t nan_rows = 0;
#pragma unroll
  for (int n = 0; n < kHeadDim / 2; ++n)
    nan_rows |= uint32_t{o[n] != o[n]} << (first_row_in_warp() + n / 2 % 2 * 8);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) nan_rows |= __shfl_xor_sync(0xffffffffu, nan_rows, lanes);

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_in_warp = first_row_in_warp() + 8 * r;
    const int64_t i = warp_row + row_in_warp;
    if (i < z.seqlen_q && first_column_in_eight() == 0)
      static_cast<float*>(p.lse)[(b * z.heads + h) * z.seqlen_q + i] = results[r].lse;
    // Of 32 columns, the four threads of a row hold pairs in each eight; each then stores one eight.
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 32) {
      uint32_t pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = (c / 8 + n) * 4 + 2 * r;
        pairs[n] = ptx::pack<In>(o[at], o[at + 1]);
      }
      transpose_in_four(pairs);
      if (i < z.seqlen_q && !(nan_rows >> row_in_warp & 1))
        *reinterpret_cast<uint4*>(p.out.row<In>(b, h, i) + c + 4 * first_column_in_eight()) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
#pragma unroll 1
  for (int n = 0; n < kWarpRows; ++n)
    if ((nan_rows >> n & 1) && warp_row + n < z.seqlen_q)
      attend_alone<In, kHeadDim>(p, b, h, warp_row + n, scale2);
}

}  // namespace flash_attn_ext::cuda::sm90
