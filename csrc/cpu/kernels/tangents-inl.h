// The tangent e of the scores on one tile (docs/derivative_formulas.md), for forward mode and for double backward:
//
//   w = <t_q, k> + <q, t_k>    e = y' scale w - t_slope distance + t_mask
#pragma once

#include "scores-inl.h"

// Returns the params of the same call with other tensors for q, k and v. Code that computes <q, k> then computes
// <t_q, k>.
template <class Params>
Params with_inputs(const Params& p, const Tensor4& q, const Tensor4& k, const Tensor4& v) {
  Params r = p;
  r.q = q;
  r.k = k;
  r.v = v;
  return r;
}

// Input: t_scores[row][lane] = product_scale() * w. Output: e. `tanh_tile` is the softcap's tanh, null without a
// softcap. `curvature` (or null) receives y'' scale w, the derivative of y' in e with respect to <q, k>. Masked
// elements are arbitrary.
template <class T>
inline void finish_tangents(const AttentionParams& p, const Tangents& t, const TileFrame& f,
                            const T* tanh_tile, T* mask_tile, T* t_scores, T* curvature) {
  constexpr int L = kLanes<T>;
  const T unit = static_cast<T>(p.softcap > 0 ? p.softcap : 1);  // unit * product_scale() = scale
  for (int64_t n = 0; n < f.rows() * f.ld; n += L) {
    Vec<T> e = load<T>(t_scores + n) * unit;
    if (tanh_tile) {
      const Vec<T> tanh = load<T>(tanh_tile + n);
      e *= T(1) - tanh * tanh;
      if (curvature) store<T>(curvature + n, e * tanh * static_cast<T>(-2 / p.softcap));
    }
    store<T>(t_scores + n, e);
  }
  if (t.alibi) {
    const T slope = static_cast<const T*>(t.alibi.slopes)[f.b * t.alibi.stride_b + f.h * t.alibi.stride_h];
    for (int64_t r = 0; r < f.rows(); ++r)
      for (int64_t c = 0; c < f.ld; c += L) {
        T* e = t_scores + r * f.ld + c;
        store<T>(e, load<T>(e) - slope * alibi_distance<T>(p.band, f, r, c));
      }
  }
  if (t.mask) {
    load_bias_tile<T>(t.mask, f, mask_tile);
    for (int64_t n = 0; n < f.rows() * f.ld; n += L)
      store<T>(t_scores + n, load<T>(t_scores + n) + load<T>(mask_tile + n));
  }
}
