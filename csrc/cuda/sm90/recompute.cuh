// Gradients of one row by the definition, by a warp, from the elements that the row sees and only those: for
// columns that came out as NaN because of something hidden. nan_rows.cuh says when.
#pragma once

#include "../../core/mask.h"
#include "../lanes.cuh"
#include "../scores.cuh"
#include "backward_plan.h"
#include "nan_rows.cuh"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

// Of a row of kHeadDim columns a lane holds every 32nd.
template <class In, int kHeadDim>
struct LaneRow {
  static constexpr int kCount = kHeadDim / 32;
  float x[kCount] = {};

  LaneRow() = default;
  __device__ LaneRow(const Tensor4& t, int64_t b, int64_t h, int64_t row) {
    const In* from = t.row<In>(b, h, row) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = widen(from[32 * n]);
  }
  __device__ float dot(const LaneRow& other) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) sum += x[n] * other.x[n];
    return total_of_lanes<32>(sum);
  }
  __device__ void add(float factor, const LaneRow& other) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] += factor * other.x[n];
  }
};

struct ElementAlone {
  float prob, dscore;
};

template <class Row>
__device__ ElementAlone element_alone(const BackwardParams& p, const BackwardWorkspace& w, int64_t head,
                                      int64_t i, const Row& q, const Row& k, const Row& v, const Row& dout) {
  const int64_t at = head * w.rows + i;
  const float scale2 = static_cast<float>(p.scale * kLog2E);
  const float prob = ptx::exp2_fast(fmaf(q.dot(k), scale2, -w.lse2[at]));
  return {prob, prob * (dout.dot(v) - w.delta[at])};
}

// dK and dV of key j, in the columns [begin, end).
template <class In, int kHeadDim>
__device__ void key_gradients_alone(const BackwardParams& p, const BackwardWorkspace& w, int64_t b,
                                    int64_t h_kv, int64_t j, int begin, int end) {
  using Row = LaneRow<In, kHeadDim>;
  using Columns = NanColumns<In, kHeadDim>;
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv;
  const Range seen = visible_queries(p.band, j, j + 1, z.seqlen_q);
  const Row k(p.k, b, h_kv, j), v(p.v, b, h_kv, j);
  const Columns of_dk = p.dk ? Columns(p.dk, b, h_kv, j, begin, end) : Columns();
  const Columns of_dv = p.dv ? Columns(p.dv, b, h_kv, j, begin, end) : Columns();
  Row dk, dv;
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h)
    for (int64_t i = seen.begin; i < seen.end && (of_dk.any_open(dk.x) || of_dv.any_open(dv.x)); ++i) {
      const Row q(p.q, b, h, i), dout(p.dout, b, h, i);
      const ElementAlone element = element_alone(p, w, b * z.heads + h, i, q, k, v, dout);
      dk.add(element.dscore, q);
      dv.add(element.prob, dout);
    }
  of_dk.store(p.dk, b, h_kv, j, static_cast<float>(p.scale), dk.x);
  of_dv.store(p.dv, b, h_kv, j, 1.0f, dv.x);
}

// dQ of query i.
template <class In, int kHeadDim>
__device__ void query_gradient_alone(const BackwardParams& p, const BackwardWorkspace& w, int64_t b,
                                     int64_t h, int64_t i) {
  using Row = LaneRow<In, kHeadDim>;
  const Sizes& z = p.sizes;
  const int64_t h_kv = z.kv_head(h);
  const Range seen = visible_keys(p.band, i, i + 1, z.seqlen_k);
  const Row q(p.q, b, h, i), dout(p.dout, b, h, i);
  const NanColumns<In, kHeadDim> columns(p.dq, b, h, i);
  Row dq;
  for (int64_t j = seen.end - 1; j >= seen.begin && columns.any_open(dq.x); --j) {
    const Row k(p.k, b, h_kv, j), v(p.v, b, h_kv, j);
    dq.add(element_alone(p, w, b * z.heads + h, i, q, k, v, dout).dscore, k);
  }
  columns.store(p.dq, b, h, i, static_cast<float>(p.scale), dq.x);
}

// dK and dV of a warp's 16 keys, where they came out as NaN. `tiles`: the query rows of the block's tiles.
template <class In, int kHeadDim>
__device__ void repair_keys(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h_kv,
                            int64_t warp_key, Range tiles, uint32_t nan_rows, int begin, int end) {
  const Sizes& z = p.sizes;
  const int64_t keys = smaller<int64_t>(kWarpRows, z.seqlen_k - warp_key), group = z.heads / z.heads_kv;
  if (nan_rows == 0 || keys <= 0) return;
  const Range first = visible_queries(p.band, warp_key, warp_key + 1, z.seqlen_q);
  const Range last = visible_queries(p.band, warp_key + keys - 1, warp_key + keys, z.seqlen_q);
  const int64_t end_row = smaller<int64_t>(tiles.end, z.seqlen_q);
  const Range before{tiles.begin, smaller<int64_t>(last.begin, end_row)},
      behind{larger<int64_t>(first.end, tiles.begin), end_row};
  bool found = false;
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group && !found; ++h)
    for (const Tensor4& t : {p.q, p.dout})
      for (const Range& hidden : {before, behind})
        found = found || has_non_finite_rows<In, kHeadDim>(t, b, h, hidden);
  if (!found) return;
  __syncwarp();  // each lane sees what the others have stored of a row
#pragma unroll 1
  for (int n = 0; n < keys; ++n)
    if (nan_rows >> n & 1) key_gradients_alone<In, kHeadDim>(p, w, b, h_kv, warp_key + n, begin, end);
}

// dQ of a warp's 16 queries, where it came out as NaN.
template <class In, int kHeadDim>
__device__ void repair_queries(const BackwardParams& p, const BackwardWorkspace& w, int64_t b, int64_t h,
                               int64_t warp_row, uint32_t nan_rows) {
  constexpr int64_t kRows = backward_rows(kHeadDim), kKeys = backward_keys(kHeadDim);
  const Sizes& z = p.sizes;
  const int64_t rows = smaller<int64_t>(kWarpRows, z.seqlen_q - warp_row), h_kv = z.kv_head(h);
  if (nan_rows == 0 || rows <= 0) return;
  // The key tiles that add to this tile of dQ.
  const int64_t tile_row = warp_row / kRows * kRows;
  const Range seen =
      visible_keys(p.band, tile_row, smaller<int64_t>(tile_row + kRows, z.seqlen_q), z.seqlen_k);
  const int64_t begin = seen.begin / kKeys * kKeys,
                end = smaller<int64_t>(ceil_div(seen.end, kKeys) * kKeys, z.seqlen_k);
  const Range first = visible_keys(p.band, warp_row, warp_row + 1, z.seqlen_k);
  const Range last = visible_keys(p.band, warp_row + rows - 1, warp_row + rows, z.seqlen_k);
  if (!has_non_finite_rows<In, kHeadDim>(p.k, b, h_kv, {begin, smaller<int64_t>(last.begin, end)}) &&
      !has_non_finite_rows<In, kHeadDim>(p.k, b, h_kv, {larger<int64_t>(first.end, begin), end}))
    return;
  __syncwarp();  // each lane sees what the others have stored of a row
#pragma unroll 1
  for (int n = 0; n < rows; ++n)
    if (nan_rows >> n & 1) query_gradient_alone<In, kHeadDim>(p, w, b, h, warp_row + n);
}

}  // namespace flash_attn_ext::cuda::sm90
