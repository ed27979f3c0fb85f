// The steps of a consumer of the backward for one tile: five products, and P and dS between them. Tiles are transposed,
// 64 keys by the queries. See wgmma.h for the elements of a thread.
#pragma once

#include "band.h"
#include "panels.h"
#include "pipeline.cuh"
#include "recompute.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kConsumerBarrier = 1;  // a named barrier; 0 is __syncthreads

// The columns of dK, dV or dQ that a warpgroup computes, if two share them. Half of 192 columns is a panel and a half.
// Then `main` is the first or the last panel, and `rest` is half of the panel between them.
template <int kColumns_>
struct ColumnsOfWarpgroup {
  static constexpr int kColumns = kColumns_;
  static constexpr int kRest = kColumns > kPanelColumns ? kColumns % kPanelColumns : 0,
                       kMain = kColumns - kRest;
  int main, rest;  // the first column of each part
  int begin;       // the first of all columns

  __device__ explicit ColumnsOfWarpgroup(int number)
      : main(number * (kColumns + kRest)), rest(kMain + number * kRest), begin(number * kColumns) {}
};

// `kCount` elements of an accumulator, from element `kFirst` on.
template <int kFirst, int kCount, int kElements>
__device__ float (&part_of(float (&x)[kElements])) [kCount] {
  static_assert(kFirst + kCount <= kElements);
  return *reinterpret_cast<float (*)[kCount]>(&x[kFirst]);
}

// Calls product(columns, sum) for `main` and for `rest`: the first column, and the part of the accumulator.
template <class Columns, int kElements, class Product>
__device__ void for_each_part(const Columns& columns, float (&sum)[kElements], const Product& product) {
  product(columns.main, part_of<0, Columns::kMain / 2>(sum));
  if constexpr (Columns::kRest > 0)
    product(columns.rest, part_of<Columns::kMain / 2, Columns::kRest / 2>(sum));
}

// Starts S^T = K Q^T, or dP^T = V dO^T.
template <class In, class LeftTile, class RightTile, int kHeadDim, int kElements>
__device__ void start_product(uint64_t left, uint64_t right, float (&x)[kElements]) {
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n)
    ptx::wgmma_shared<In>(x, step_descriptor(left, columns_step<LeftTile>(n)),
                          step_descriptor(right, columns_step<RightTile>(n)), n > 0);
}

// Starts dV += P^T dO, or dK += dS^T Q, with the left operand in registers or in shared memory.
template <class In, int kSteps, int kElements>
__device__ void start_sum(const uint32_t (&weights)[kSteps][4], uint64_t rows, float (&sum)[kElements]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
    ptx::wgmma_registers<In>(sum, weights[n], step_descriptor(rows, rows_step(n)));
}
template <class In, class WeightTile, int kSteps, int kElements>
__device__ void start_sum(uint64_t weights, uint64_t rows, float (&sum)[kElements]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
    ptx::wgmma_shared_right_by_rows<In>(sum, step_descriptor(weights, columns_step<WeightTile>(n)),
                                        step_descriptor(rows, rows_step(n)));
}

// Starts dQ = dS K for 64 queries.
template <class In, int kSteps, int kElements>
__device__ void start_dq(uint64_t ds, uint64_t k, float (&dq)[kElements]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
    ptx::wgmma_shared_by_rows<In>(dq, step_descriptor(ds, rows_step(n)), step_descriptor(k, rows_step(n)),
                                  n > 0);
}

// lse or delta of the queries of a thread's columns: two of each eight. They are read before the wait for the product,
// so that the reads overlap with the product.
template <int kEights>
struct Terms {
  float2 pairs[kEights];

  __device__ explicit Terms(const float* terms) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
      pairs[n] = *reinterpret_cast<const float2*>(terms + 8 * n + first_column_in_eight());
  }
  // The term for element 4 n + e of an accumulator.
  __device__ float operator()(int n, int e) const { return e % 2 ? pairs[n].y : pairs[n].x; }
};

// Converts S^T to P^T.
template <int kElements>
__device__ void probabilities(float scale2, const Terms<kElements / 4>& lse2, float (&s)[kElements]) {
#pragma unroll
  for (int n = 0; n < kElements / 4; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[4 * n + e] = ptx::exp2_fast(fmaf(s[4 * n + e], scale2, -lse2(n, e)));
}

// The same with a softcap. Rounds P^T, and replaces S^T by P^T times the derivative of the softcap, the factor of dS^T.
template <class In, int kElements>
__device__ void capped_probabilities(const ScoreScale& score, const Terms<kElements / 4>& lse2,
                                     float (&s)[kElements], uint32_t (&weights)[kElements / 8][4]) {
#pragma unroll
  for (int n = 0; n < kElements / 2; ++n) {
    float probs[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float tanh = score.tanh(s[2 * n + e]);
      probs[e] = ptx::exp2_fast(fmaf(tanh, score.scale2, -lse2(n / 2, n % 2 * 2 + e)));
      s[2 * n + e] = probs[e] * fmaf(-tanh, tanh, 1.0f);
    }
    weights[n / 4][n % 4] = ptx::pack<In>(probs[0], probs[1]);
  }
}

// Converts dP^T to dS^T.
template <int kElements>
__device__ void score_gradients(const float (&p)[kElements], const Terms<kElements / 4>& delta,
                                float (&dp)[kElements]) {
#pragma unroll
  for (int n = 0; n < kElements / 4; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[4 * n + e] = p[4 * n + e] * (dp[4 * n + e] - delta(n, e));
}

// Marks the elements of a thread's part of S^T that the band shows. `key`: the thread's first key. Bit r of `attends`:
// the mask shows key + 8 r.
struct SeenElements {
  uint32_t seen[2];  // for key and key + 8

  __device__ SeenElements(const ShortBand& band, int key, int first_row, uint32_t attends = 3) {
    const int row = first_row + first_column_in_eight();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      seen[r] = columns_between(band.begin_row(key + 8 * r) - row, band.end_row(key + 8 * r) - row);
      if (!(attends >> r & 1)) seen[r] = 0;
    }
  }

  // Hides more elements: bit 16 r + n of `shown` is bit n of seen[r].
  __device__ void hide_others(uint32_t shown) {
    seen[0] &= shown;
    seen[1] &= shown >> 16;
  }

  // Sets all hidden elements to 0, also NaN.
  template <int kElements>
  __device__ void clear_others(float (&x)[kElements]) const {
#pragma unroll
    for (int n = 0; n < kElements; ++n) x[n] = seen[n / 2 % 2] >> (n / 4 * 2 + n % 2) & 1 ? x[n] : 0.0f;
  }
  // The same for rounded pairs.
  template <int kSteps>
  __device__ void clear_others(uint32_t (&pairs)[kSteps][4]) const {
#pragma unroll
    for (int n = 0; n < 4 * kSteps; ++n) {
      uint32_t& pair = pairs[n / 4][n % 4];
      const uint32_t both = seen[n % 2] >> (n / 2 * 2);
      pair = both & 1 ? pair : pair & 0xffff0000u;
      pair = both & 2 ? pair : pair & 0x0000ffffu;
    }
  }
};

// Copies a warpgroup's accumulator of dQ to shared memory, in the layout of global memory.
template <int kElements>
__device__ void store_sums(float (*sums)[kWarpgroup][4], const float (&dq)[kElements]) {
#pragma unroll
  for (int n = 0; n < kElements / 4; ++n)
    *reinterpret_cast<float4*>(sums[n][threadIdx.x % kWarpgroup]) =
        make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
}

// Writes the existing rows of a warp's 16 rows of dK and dV, in the warpgroup's columns. `tiles`: the query rows that
// the block has read.
template <class In, int kHeadDim, class DKColumns, class DVColumns, int kDKElements, int kDVElements,
          class Hidden>
__device__ void finish_keys(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h_kv,
                            int64_t warp_key, const DKColumns& dk_columns, const DVColumns& dv_columns,
                            Range tiles, float (&dk)[kDKElements], float (&dv)[kDVElements],
                            const Hidden& hidden) {
  const int64_t length = p.sizes.seqlen_k;
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int n = 0; n < kDKElements; ++n) dk[n] *= scale;
  if (p.mask) {  // 0 x NaN is NaN: a masked key has no gradient, so it is set to 0
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool attends = !is_masked(p, b, warp_key + first_row_in_warp() + 8 * r);
#pragma unroll
      for (int n = r * 2; n < kDKElements; n += n % 2 ? 3 : 1) {
        dk[n] = attends ? dk[n] : 0.0f;
        if (n < kDVElements) dv[n] = attends ? dv[n] : 0.0f;
      }
    }
  }
  if (p.dk)
    for_each_part(dk_columns, dk, [&](int column, const auto& part) {
      store_rows<In>(p.dk, b, h_kv, warp_key, length, static_cast<int>(p.sizes.head_dim), part, column);
    });
  if (p.dv)
    for_each_part(dv_columns, dv, [&](int column, const auto& part) {
      store_rows<In>(p.dv, b, h_kv, warp_key, length, static_cast<int>(p.sizes.head_dim_v), part, column);
    });
  const KeyColumns columns{dk_columns.begin, dk_columns.begin + DKColumns::kColumns, dv_columns.begin,
                           dv_columns.begin + DVColumns::kColumns};
  repair_keys<In, kHeadDim>(p, w, b, h_kv, warp_key, tiles, rows_with_nan(dk) | rows_with_nan(dv), columns,
                            hidden);
}

}  // namespace flash_attn_ext::cuda::sm90
