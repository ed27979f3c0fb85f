// Recomputes the NaN columns of one row of a gradient, by a warp, from the visible elements only. nan_rows.cuh says
// when.
#pragma once

#include "../../core/mask.h"
#include "../lanes.cuh"
#include "../scores.cuh"
#include "backward_schedule.h"
#include "nan_rows.cuh"
#include "ptx.h"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

struct RepairedElement {
  float prob, dscore;
  bool attends;
};

template <class Row, class Hidden>
__device__ RepairedElement repaired_element(const BackwardParams& p, const BackwardWorkspace& w, int64_t b,
                                            int64_t h, int64_t i, int64_t j, const Row& q, const Row& k,
                                            const Row& v, const Row& dout, const Hidden& hidden) {
  const int64_t at = w.tiles(p, b, h, i);
  const ScoreScale score(p);
  const float product = q.dot(k), x = p.softcap > 0 ? score.tanh(product) : product;
  const float gate = p.softcap > 0 ? 1 - x * x : 1.0f;
  if constexpr (Hidden::kChangesScores) {
    bool attends;
    const auto gradient = hidden.template gradient<false>({b, h, i, j, x * score.scale, 0},
                                                          p.lse_index(b, h, i), dout.dot(v), attends);
    return {gradient.prob, gate * gradient.dscore, attends};
  } else {
    const float prob = ptx::exp2_fast(fmaf(x, score.scale2, -w.lse2[at]));
    return {prob, prob * gate * (dout.dot(v) - w.delta[at]), true};
  }
}

// Columns of dK and of dV.
struct KeyColumns {
  int dk_begin, dk_end, dv_begin, dv_end;
};

// Repairs dK and dV of key j, in `columns`.
template <class In, int kHeadDim, class Hidden>
__device__ void repair_key(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h_kv,
                           int64_t j, const KeyColumns& columns, const Hidden& hidden) {
  using Row = LaneRow<In, kHeadDim>;
  using Columns = NanColumns<In, kHeadDim>;
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv;
  const Range seen = visible_queries(p.band.without_chunks(), j, j + 1, z.seqlen_q);
  const Row k(p.k, b, h_kv, j, z.head_dim), v(p.v, b, h_kv, j, z.head_dim_v);
  const int64_t dk_end = smaller<int64_t>(columns.dk_end, z.head_dim);
  const int64_t dv_end = smaller<int64_t>(columns.dv_end, z.head_dim_v);
  const Columns of_dk = p.dk ? Columns(p.dk, b, h_kv, j, columns.dk_begin, dk_end) : Columns();
  const Columns of_dv = p.dv ? Columns(p.dv, b, h_kv, j, columns.dv_begin, dv_end) : Columns();
  Row dk, dv;
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h)
    for (int64_t i = seen.begin; i < seen.end && (of_dk.any_open(dk.x) || of_dv.any_open(dv.x)); ++i) {
      if (hidden.hides(p, b, h, i, j)) continue;
      const Row q(p.q, b, h, i, z.head_dim), dout(p.dout, b, h, i, z.head_dim_v);
      const RepairedElement element = repaired_element(p, w, b, h, i, j, q, k, v, dout, hidden);
      if (!element.attends) continue;
      dk.add(element.dscore, q);
      dv.add(element.prob, dout);
    }
  of_dk.store(p.dk, b, h_kv, j, static_cast<float>(p.scale), dk.x);
  of_dv.store(p.dv, b, h_kv, j, 1.0f, dv.x);
}

// Repairs dQ of query i.
template <class In, int kHeadDim, class Hidden>
__device__ void repair_query(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h,
                             int64_t h_kv, int64_t i, const Hidden& hidden) {
  using Row = LaneRow<In, kHeadDim>;
  const Sizes& z = p.sizes;
  const Range seen = visible_keys(p.band.without_chunks(), i, i + 1, z.seqlen_k);
  const Row q(p.q, b, h, i, z.head_dim), dout(p.dout, b, h, i, z.head_dim_v);
  const NanColumns<In, kHeadDim> columns(p.dq, b, h, i, 0, z.head_dim);
  Row dq;
  for (int64_t j = seen.end - 1; j >= seen.begin && columns.any_open(dq.x); --j) {
    if (hidden.hides(p, b, h, i, j)) continue;
    const Row k(p.k, b, h_kv, j, z.head_dim), v(p.v, b, h_kv, j, z.head_dim_v);
    const RepairedElement element = repaired_element(p, w, b, h, i, j, q, k, v, dout, hidden);
    if (element.attends) dq.add(element.dscore, k);
  }
  columns.store(p.dq, b, h, i, static_cast<float>(p.scale), dq.x);
}

// Repairs dK and dV of a warp's 16 keys, where they are NaN. `tiles`: the query rows that the block has read.
template <class In, int kHeadDim, class Hidden>
__device__ void repair_keys(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h_kv,
                            int64_t warp_key, Range tiles, uint32_t nan_rows, const KeyColumns& columns,
                            const Hidden& hidden) {
  const Sizes& z = p.sizes;
  const int64_t keys = smaller<int64_t>(kWarpRows, z.seqlen_k - warp_key), group = z.heads / z.heads_kv;
  if (nan_rows == 0 || keys <= 0) return;
  const Range first = visible_queries(p.band.without_chunks(), warp_key, warp_key + 1, z.seqlen_q);
  const Range last =
      visible_queries(p.band.without_chunks(), warp_key + keys - 1, warp_key + keys, z.seqlen_q);
  const int64_t end_row = smaller<int64_t>(tiles.end, end_of_query_rows(p));
  Range before{tiles.begin, smaller<int64_t>(last.begin, end_row)},
      after{larger<int64_t>(first.end, tiles.begin), end_row};
  if constexpr (Hidden::kHidesAnywhere) {
    before.end = end_row;
    after.begin = end_row;
  }
  bool found = false;
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group && !found; ++h)
    for (const Range& hidden : {before, after})
      found = found || has_non_finite_rows<In, kHeadDim>(p.q, b, h, hidden, z.head_dim) ||
              has_non_finite_rows<In, kHeadDim>(p.dout, b, h, hidden, z.head_dim_v);
  if (!found) return;
  __syncwarp();  // publishes the lanes' stores of a row to the warp
#pragma unroll 1
  for (int n = 0; n < keys; ++n)
    if (nan_rows >> n & 1) repair_key<In, kHeadDim>(p, w, b, h_kv, warp_key + n, columns, hidden);
}

// Repairs dQ of a warp's 16 queries, where it is NaN. kKeys: of the blocks that visit a tile of queries together.
template <class In, int kHeadDim, int kKeys, class Hidden>
__device__ void repair_queries(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h,
                               int64_t warp_row, uint32_t nan_rows, const Hidden& hidden) {
  const int64_t tile_rows = w.tiles.tile_rows;
  const Sizes& z = p.sizes;
  const int64_t rows = smaller<int64_t>(kWarpRows, z.seqlen_q - warp_row);
  const int h_kv = static_cast<int>(h) / (static_cast<int>(z.heads) / static_cast<int>(z.heads_kv));
  if (nan_rows == 0 || rows <= 0) return;
  // The key tiles that add to this tile of dQ.
  const int64_t tile_row = warp_row & -tile_rows;
  const Range seen = visible_keys(p.band.without_chunks(), tile_row,
                                  smaller<int64_t>(tile_row + tile_rows, z.seqlen_q), z.seqlen_k);
  const Range tiles{seen.begin / kKeys * kKeys, ceil_div(seen.end, kKeys) * kKeys};
  if (!has_non_finite_hidden_keys<In, kHeadDim>(p, p.k, z.head_dim, b, h_kv, {warp_row, warp_row + rows},
                                                tiles, hidden))
    return;
  __syncwarp();  // publishes the lanes' stores of a row to the warp
#pragma unroll 1
  for (int n = 0; n < rows; ++n)
    if (nan_rows >> n & 1) repair_query<In, kHeadDim>(p, w, b, h, h_kv, warp_row + n, hidden);
}

}  // namespace flash_attn_ext::cuda::sm90
