// The kernels before and after the backward's main kernel: the row terms of each query, and dQ from its sums.
#pragma once

#include "../call_of_block.cuh"
#include "../lanes.cuh"
#include "backward_schedule.h"
#include "pipeline.cuh"
#include "recompute.cuh"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// <dO, O> of a row of `columns`. kLanes threads call it; each reads 16 bytes of both.
template <class In, int kLanes>
__device__ float row_product(const In* dout, const In* out, int64_t columns) {
  const int column = threadIdx.x % kLanes * 8;
  float sum = 0;
  if (dout && column < columns) {
    const uint4 words[2] = {*reinterpret_cast<const uint4*>(dout + column),
                            *reinterpret_cast<const uint4*>(out + column)};
    In elements[2][8];
    memcpy(elements, words, sizeof(words));
#pragma unroll
    for (int n = 0; n < 8; ++n) sum += widen(elements[0][n]) * widen(elements[1][n]);
  }
  return total_of_lanes<kLanes>(sum);
}

// The 64 query rows of a head that a block computes.
template <int kHeadDim>
struct QueryPiece {
  static constexpr int kFours = kPieceRows * kHeadDim / 4;
  int head, b, h, first_row;

  __device__ QueryPiece(const AttentionParams& call, const BackwardWorkspace& w) {
    const int pieces = w.tiles.longest * (w.tiles.tile_rows / kPieceRows);
    const int heads = static_cast<int>(call.sizes.heads);
    head = static_cast<int>(blockIdx.x) / pieces;
    b = head / heads;
    h = head % heads;
    first_row = static_cast<int>(blockIdx.x) % pieces * kPieceRows;
  }
  __device__ float4* sums(const BackwardWorkspace& w, const AttentionParams& p) const {
    return reinterpret_cast<float4*>(w.dq) + w.tiles(p, b, h, first_row) / kPieceRows * kFours;
  }
};

// A block computes 64 query rows of a head, including the padding rows of the last tile.
template <class In, class Config>
__global__ void __launch_bounds__(kWarpgroup)
    row_terms_kernel(const BackwardParams call, const BackwardWorkspace w) {
  using Piece = QueryPiece<Config::kHeadDim>;
  constexpr int kRows = Config::kRows;
  constexpr int kLanes = Config::kHeadDimV <= 64 ? 8 : Config::kHeadDimV <= 128 ? 16 : 32;
  const Piece piece(call, w);
  const int64_t b = piece.b, h = piece.h, first_row = piece.first_row;
  const BackwardParams& p = call_of_block<Config>(call, b);
  const Sizes& z = p.sizes;

  if (threadIdx.x == 0 && first_row % kRows == 0)
    w.turns[int64_t{piece.head} * w.tiles.longest + first_row / kRows] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *w.ticket = 0;
  if (first_row / kRows * kRows >= z.seqlen_q) return;  // the packed sequence ends before this tile
  float4* const sums = piece.sums(w, p);
  for (int n = threadIdx.x; n < Piece::kFours; n += kWarpgroup) sums[n] = make_float4(0, 0, 0, 0);

  for (int r = threadIdx.x / kLanes; r < kPieceRows; r += kWarpgroup / kLanes) {
    const int64_t i = first_row + r;
    const bool inside = i < z.seqlen_q;
    const float dot = row_product<In, kLanes>(inside ? p.dout.row<In>(b, h, i) : nullptr,
                                              inside ? p.out.row<In>(b, h, i) : nullptr, z.head_dim_v);
    if (threadIdx.x % kLanes != 0) continue;
    const int64_t from = p.lse_index(b, h, i), to = w.tiles(p, b, h, i);
    const float lse = inside ? static_cast<const float*>(p.lse)[from] : -kInf<float>;
    const float dlse = inside && p.dlse ? static_cast<const float*>(p.dlse)[from] : 0.0f;
    w.lse2[to] = lse == -kInf<float> ? kInf<float> : lse * static_cast<float>(kLog2E);
    w.delta[to] = dot - dlse;
  }
}

// A block computes 64 query rows of a head.
template <class In, class Config, class Hidden = HiddenByKeyMask>
__global__ void __launch_bounds__(kWarpgroup, Hidden::kHidesAnywhere ? 1 : 0)
    dq_kernel(const BackwardParams call, const BackwardWorkspace w, const Hidden hidden) {
#if defined(FA_HAS_HOPPER)  // other GPUs do not run this tier
  constexpr int kHeadDim = Config::kHeadDim, kColumns = kHeadDim % kPanelColumns ? 32 : kPanelColumns;
  const QueryPiece<kHeadDim> piece(call, w);
  const int64_t b = piece.b, h = piece.h, warp_row = piece.first_row + threadIdx.x / 32 * kWarpRows;
  const BackwardParams& p = call_of_block<Config>(call, b);
  if (piece.first_row >= p.sizes.seqlen_q) return;  // the packed sequence ends before these rows
  const float scale = static_cast<float>(p.scale);
  const float4* const sums = piece.sums(w, p);

  uint32_t nan_rows = 0;
#pragma unroll 1
  for (int column = 0; column < kHeadDim; column += kColumns) {
    float dq[kColumns / 2];
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 four = sums[(column / 8 + n) * kWarpgroup + threadIdx.x];
      dq[4 * n] = four.x * scale;
      dq[4 * n + 1] = four.y * scale;
      dq[4 * n + 2] = four.z * scale;
      dq[4 * n + 3] = four.w * scale;
    }
    store_rows<In>(p.dq, b, h, warp_row, p.sizes.seqlen_q, static_cast<int>(p.sizes.head_dim), dq, column);
    nan_rows |= rows_with_nan(dq);
  }
  repair_queries<In, kHeadDim, Config::kSharedKeys>(p, w, b, h, warp_row, nan_rows, hidden);
#endif
}

}  // namespace flash_attn_ext::cuda::sm90
