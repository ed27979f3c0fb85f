// Gradients of one row by the definition, by a warp. In a product a masked 0 times a NaN or Inf is NaN; here
// what is masked is not read. Slow, and only for rows that came out as NaN.
#pragma once

#include "../../core/mask.h"
#include "../lanes.cuh"
#include "../scores.cuh"
#include "backward_plan.h"
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
  // The columns [begin, end), multiples of 32.
  __device__ void store(const Tensor4& t, int64_t b, int64_t h, int64_t row, float factor, int begin = 0,
                        int end = kHeadDim) const {
    In* to = t.row<In>(b, h, row) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (begin <= 32 * n && 32 * n < end) to[32 * n] = round_to<In>(x[n] * factor);
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
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv;
  const Range seen = visible_queries(p.band, j, j + 1, z.seqlen_q);
  const Row k(p.k, b, h_kv, j), v(p.v, b, h_kv, j);
  Row dk, dv;
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h)
    for (int64_t i = seen.begin; i < seen.end; ++i) {
      const Row q(p.q, b, h, i), dout(p.dout, b, h, i);
      const ElementAlone element = element_alone(p, w, b * z.heads + h, i, q, k, v, dout);
      dk.add(element.dscore, q);
      dv.add(element.prob, dout);
    }
  if (p.dk) dk.store(p.dk, b, h_kv, j, static_cast<float>(p.scale), begin, end);
  if (p.dv) dv.store(p.dv, b, h_kv, j, 1.0f, begin, end);
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
  Row dq;
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const Row k(p.k, b, h_kv, j), v(p.v, b, h_kv, j);
    dq.add(element_alone(p, w, b * z.heads + h, i, q, k, v, dout).dscore, k);
  }
  dq.store(p.dq, b, h, i, static_cast<float>(p.scale));
}

}  // namespace flash_attn_ext::cuda::sm90
