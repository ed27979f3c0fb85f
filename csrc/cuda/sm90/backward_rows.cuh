// Before and after the backward's main kernel: what it needs of each query row, and dQ from its sums.
#pragma once

#include "../lanes.cuh"
#include "backward_plan.h"
#include "pipeline.cuh"
#include "recompute.cuh"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// <dO, O> of a row, by the kHeadDim / 8 threads that call; each reads 16 bytes of both.
template <class In, int kHeadDim>
__device__ float row_product(const In* dout, const In* out) {
  constexpr int kLanes = kHeadDim / 8;
  const int column = threadIdx.x % kLanes * 8;
  float sum = 0;
  if (dout) {
    const uint4 words[2] = {*reinterpret_cast<const uint4*>(dout + column),
                            *reinterpret_cast<const uint4*>(out + column)};
    In elements[2][8];
    memcpy(elements, words, sizeof(words));
#pragma unroll
    for (int n = 0; n < 8; ++n) sum += widen(elements[0][n]) * widen(elements[1][n]);
  }
  return total_of_lanes<kLanes>(sum);
}

// A block owns 64 query rows of a head, also those that only fill up the last tile.
template <class In, int kHeadDim>
__global__ void __launch_bounds__(kWarpgroup)
    row_terms_kernel(const BackwardParams p, const BackwardWorkspace w) {
  constexpr int kRows = backward_rows(kHeadDim), kLanes = kHeadDim / 8,
                kPieceFours = kPieceRows * kHeadDim / 4;
  const Sizes& z = p.sizes;
  const int64_t pieces = w.rows / kPieceRows, head = blockIdx.x / pieces;
  const int64_t first_row = blockIdx.x % pieces * kPieceRows, b = head / z.heads, h = head % z.heads;

  auto* sums = reinterpret_cast<float4*>(w.dq) + int64_t{blockIdx.x} * kPieceFours;
  for (int n = threadIdx.x; n < kPieceFours; n += kWarpgroup) sums[n] = make_float4(0, 0, 0, 0);
  if (threadIdx.x == 0 && first_row % kRows == 0) w.turns[head * w.tiles + first_row / kRows] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *w.ticket = 0;

  for (int r = threadIdx.x / kLanes; r < kPieceRows; r += kWarpgroup / kLanes) {
    const int64_t i = first_row + r;
    const bool inside = i < z.seqlen_q;
    const float dot = row_product<In, kHeadDim>(inside ? p.dout.row<In>(b, h, i) : nullptr,
                                                inside ? p.out.row<In>(b, h, i) : nullptr);
    if (threadIdx.x % kLanes != 0) continue;
    const int64_t from = p.statistics_row(b, h, i), to = head * w.rows + i;
    const float lse = inside ? static_cast<const float*>(p.lse)[from] : -kInf<float>;
    const float dlse = inside && p.dlse ? static_cast<const float*>(p.dlse)[from] : 0.0f;
    w.lse2[to] = lse == -kInf<float> ? kInf<float> : lse * static_cast<float>(kLog2E);
    w.delta[to] = dot - dlse;
  }
}

// A block owns 64 query rows of a head.
template <class In, int kHeadDim>
__global__ void __launch_bounds__(kWarpgroup) dq_kernel(const BackwardParams p, const BackwardWorkspace w) {
#if defined(FA_HAS_HOPPER)  // this tier runs nowhere else
  const Sizes& z = p.sizes;
  const int64_t pieces = w.rows / kPieceRows, head = blockIdx.x / pieces, b = head / z.heads,
                h = head % z.heads;
  const int64_t warp_row = blockIdx.x % pieces * kPieceRows + threadIdx.x / 32 * kWarpRows;
  const float scale = static_cast<float>(p.scale);
  const auto* sums =
      reinterpret_cast<const float4*>(w.dq) + int64_t{blockIdx.x} * (kPieceRows * kHeadDim / 4);

  float dq[kHeadDim / 2];
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    const float4 four = sums[n * kWarpgroup + threadIdx.x];
    dq[4 * n] = four.x * scale;
    dq[4 * n + 1] = four.y * scale;
    dq[4 * n + 2] = four.z * scale;
    dq[4 * n + 3] = four.w * scale;
  }
  store_rows<In>(p.dq, b, h, warp_row, z.seqlen_q, dq);
  repair_queries<In, kHeadDim>(p, w, b, h, warp_row, rows_with_nan(dq));
#endif
}

}  // namespace flash_attn_ext::cuda::sm90
