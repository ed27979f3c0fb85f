// The tangent e of a score (docs/derivative_formulas.md), for forward mode and for double backward:
//
//   w = <t_q, k> + <q, t_k>    e = y' scale w - t_slope distance + t_mask
#pragma once

#include "scores.cuh"

namespace flash_attn_ext::cuda {

template <class T>
struct ScoreTangent {
  T value;      // e
  T curvature;  // y'' scale w: the derivative of the softcap's y' in e with respect to <q, k>
};

// The tangent of a score that attends. `product` is w.
template <class T>
__device__ ScoreTangent<T> tangent_of(const AttentionParams& p, const Tangents& t, const Score<T>& score,
                                      T product, int64_t b, int64_t h, int64_t i, int64_t j) {
  T value = static_cast<T>(p.scale) * product, curvature = 0;
  if (p.softcap > 0) {
    value *= T(1) - score.tanh * score.tanh;
    curvature = value * score.tanh * static_cast<T>(-2 / p.softcap);
  }
  if (t.alibi) value -= alibi_slope<T>(t.alibi, b, h) * alibi_distance<T>(p.band, i, j);
  if (t.mask) value += mask_bias<T>(t.mask, b, h, i, j);
  return {value, curvature};
}

}  // namespace flash_attn_ext::cuda
