// Computes out and lse from the accumulators.
#pragma once

#include "../../core/mask.h"
#include "../lanes.cuh"
#include "nan_rows.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

// finish_row() by instructions with an error of 2^-22, in a third of the instructions: no product runs at the end of a task.
__device__ inline RowResult<float> finish_fast(const AttentionParams& p, int64_t b, int64_t h, float max,
                                               float sum) {
  RowSum<float> row{max, sum};
  float from_max = 1.0f;  // to the maximum with the sink
  if (p.sink) {
    row = add_sink(p, b, h, row);
    from_max = std::exp(max - row.max);
  }
  const bool sees_nothing = row.sum == 0.0f;  // out is 0 and lse is -inf, by contract
  return {sees_nothing ? 0.0f : ptx::reciprocal_fast(row.sum) * from_max,
          sees_nothing ? -kInf<float> : row.max + ptx::log2_fast(row.sum) * static_cast<float>(1 / kLog2E)};
}

// Recomputes the NaN columns of row i of `out`, by a warp, from the visible keys of `keys` only. It stops when each of
// these columns is NaN again, because further keys change nothing. `factor_of(max, sum)`: the factor of the sum, from
// the row's statistics.
template <class In, int kHeadDim, class Out, class FactorOf, class Hidden = HiddenByKeyMask>
__device__ void repair_row(const AttentionParams& p, int64_t b, int64_t h, int64_t i, Range keys,
                           const Tensor4& to, const FactorOf& factor_of, const Hidden& hidden = {}) {
  using Row = LaneRow<In, kHeadDim>;
  const Sizes& z = p.sizes;
  const int64_t h_kv = z.kv_head(h);
  const ScoreScale score(p);
  // From the values below to scores, and to exponents of 2.
  const float to_score = Hidden::kChangesScores ? 1.0f : score.scale;
  const float to_exponent = Hidden::kChangesScores ? static_cast<float>(kLog2E) : score.scale2;
  const Row q(p.q, b, h, i, z.head_dim);
  const NanColumns<Out, kHeadDim> columns(to, b, h, i, 0, z.head_dim_v);
  float max = -kInf<float>, sum = 0;
  Row out;
  const Range seen = visible_keys(p.band.without_chunks(), i, i + 1, z.seqlen_k);
  const int64_t begin = larger(seen.begin, keys.begin), end = smaller(seen.end, keys.end);
  for (int64_t j = end - 1; j >= begin && columns.any_open(out.x); --j) {
    if (hidden.hides(p, b, h, i, j)) continue;
    float product = q.dot(Row(p.k, b, h_kv, j, z.head_dim));
    if (p.softcap > 0) product = score.tanh(product);
    if constexpr (Hidden::kChangesScores) {
      product = hidden.new_score({b, h, i, j, product * score.scale, 0});
      if (product == -kInf<float>) continue;
    }
    const float new_max = fmaxf(max, product);
    const float reference = new_max == -kInf<float> ? 0.0f : new_max;
    const float factor = ptx::exp2_fast((max - reference) * to_exponent);
    const float weight = ptx::exp2_fast((product - reference) * to_exponent);
    max = new_max;
    sum = sum * factor + weight;
    out.scale(factor);
    out.add(weight, Row(p.v, b, h_kv, j, z.head_dim_v));
  }
  columns.store(to, b, h, i, factor_of(max * to_score, sum), out.x);
}

// 0 x NaN is NaN, so a hidden key with a NaN or Inf in its value row can make a visible result NaN. This calls
// repair(n) for each NaN row n, but only under one condition. A value row of the tiles [begin, end) is not finite and
// is hidden from one of the warp's queries. Every other NaN comes from a visible key.
template <class In, int kHeadDim, class Repair, class Hidden = HiddenByKeyMask>
__device__ void repair_rows(const AttentionParams& p, int64_t b, int64_t h_kv, Range queries, Range tiles,
                            uint32_t nan_rows, const Repair& repair, const Hidden& hidden = {}) {
  if (nan_rows == 0 || queries.begin >= queries.end) return;
  if (!has_non_finite_hidden_keys<In, kHeadDim>(p, p.v, p.sizes.head_dim_v, b, h_kv, queries, tiles, hidden))
    return;
  __syncwarp();  // publishes the lanes' stores of a row to the warp
#pragma unroll 1
  for (int n = 0; n < kWarpRows; ++n)
    if (nan_rows >> n & 1) repair(n);
}

// Whether all elements are finite. 0 x is NaN for NaN and Inf.
template <int kElements>
__device__ bool are_finite(const float (&x)[kElements]) {
  float zeros[4] = {};  // independent sums: the instructions need not wait for each other
#pragma unroll
  for (int n = 0; n < kElements; ++n) zeros[n % 4] = fmaf(x[n], 0.0f, zeros[n % 4]);
  return (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]) == 0.0f;
}

// Finishes the existing rows of a warp's 16 rows: stores lse and converts o to out. Returns whether the thread's elements
// are finite.
template <int kElements>
__device__ bool finish_rows(const AttentionParams& p, int64_t b, int64_t h, int64_t warp_row, float scale,
                            const RowStatistics& statistics, float (&o)[kElements]) {
  RowResult<float> results[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    results[r] =
        finish_fast(p, b, h, statistics.max[r] * scale, total_of_lanes<kRowLanes>(statistics.sum[r]));
  const float factors[2] = {results[0].out_factor, results[1].out_factor};
  scale_rows(o, factors);

  const int64_t i = warp_row + first_row_in_warp();
  float* const lse = static_cast<float*>(p.lse) + p.lse_index(b, h, i);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (i + 8 * r < p.sizes.seqlen_q && first_column_in_eight() == 0) lse[8 * r] = results[r].lse;
  return are_finite(o);
}

// Repairs the NaN rows, after all rows have been stored. `tiles`: the keys that the block has read.
template <class In, int kHeadDim, class Hidden>
__device__ void repair_finished_rows(const AttentionParams& p, int64_t b, int64_t h, int64_t warp_row,
                                     Range tiles, uint32_t nan_rows, const Hidden& hidden) {
  const Sizes& z = p.sizes;
  const Range queries{warp_row, smaller<int64_t>(warp_row + kWarpRows, z.seqlen_q)};
  const auto factor_of = [&](float max, float sum) { return finish_fast(p, b, h, max, sum).out_factor; };
  const auto repair = [&](int n) {
    if (warp_row + n >= z.seqlen_q) return;
    repair_row<In, kHeadDim, In>(p, b, h, warp_row + n, {0, z.seqlen_k}, p.out, factor_of, hidden);
  };
  repair_rows<In, kHeadDim>(p, b, z.kv_head(h), queries, tiles, nan_rows, repair, hidden);
}

// The stored rows of a warp's 16 that hold a NaN.
template <class In, int kHeadDim>
__device__ uint32_t stored_rows_with_nan(const AttentionParams& p, int64_t b, int64_t h, int64_t warp_row) {
  uint32_t rows = 0;
#pragma unroll 1
  for (int n = 0; n < kWarpRows && warp_row + n < p.sizes.seqlen_q; ++n)
    rows |= uint32_t{NanColumns<In, kHeadDim>(p.out, b, h, warp_row + n, 0, p.sizes.head_dim_v).any()} << n;
  return rows;
}

}  // namespace flash_attn_ext::cuda::sm90
