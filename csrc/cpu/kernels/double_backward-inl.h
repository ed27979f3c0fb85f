// Double backward: the gradient of <t_out, dout> + <t_lse, dlse> with respect to q, k, v, mask and slopes
// (docs/derivative_formulas.md). The loops are the backward's, with ten products for each tile. Per tile, from the
// tangent e of the scores, g = R o dO V^T and f = R o dO tV^T:
//
//   dS = P o (g - delta)    A = (g - delta) o e + f - mu g    G = P o (A - gamma)
//   Z  = scale (y' G + y'' scale w dS)                        D = scale y' dS
//   dV_j += (R P (e - mu))^T dO    dK_j += Z^T Q + D^T tQ     dQ_i += Z K + D tK
//
// gamma = <dO, tO> - mu delta needs no additional loop, because tO is an input.
#pragma once

#include "backward-inl.h"
#include "tangents-inl.h"

template <class In, class T>
struct DoubleBackwardScratch : BackwardScratch<In, T> {  // probs: S, then R P (e - mu); dscores: g, G, then Z
  BackwardProducts<In, T> t_products;                    // of t_k and t_v; with t_q in place of q
  T* t_scores;                                           // [block_q][block_k]  w, e, dS, then D
  T* t_dprobs;                                           // [block_q][block_k]  dO tV^T
  T* curvature;    // [block_q][block_k]  y'' scale w, then times dS; only with softcap
  T* t_mask_tile;  // [block_q][block_k]  only with a tangent of the mask
};

template <class In, class T>
DoubleBackwardScratch<In, T> allocate_double_backward(Arena& arena, const DoubleBackwardParams& p) {
  const auto [block_q, block_k] = fitted(backward_tiling<T>(), p.sizes);
  DoubleBackwardScratch<In, T> s;
  static_cast<BackwardScratch<In, T>&>(s) = allocate_backward<In, T>(arena, p);
  s.t_products = BackwardProducts<In, T>::allocate(arena, p);
  s.t_scores = arena.take<T>(block_q * block_k);
  s.t_dprobs = arena.take<T>(block_q * block_k);
  s.curvature = p.softcap > 0 ? arena.take<T>(block_q * block_k) : nullptr;
  s.t_mask_tile = p.tangents.mask ? arena.take<T>(block_q * block_k) : nullptr;
  return s;
}

template <class T>
struct DoubleBackwardWorkspace : BackwardWorkspace<T> {
  T* gamma;  // [rows of lse]
};

template <class In, class T>
DoubleBackwardWorkspace<T> allocate_double_backward_pass(Arena& arena, const DoubleBackwardParams& p,
                                                         int threads) {
  Arena scratch(nullptr);
  allocate_double_backward<In, T>(scratch, p);
  DoubleBackwardWorkspace<T> w;
  static_cast<BackwardWorkspace<T>&>(w) =
      allocate_backward_workspace<In, T>(arena, p, threads, scratch.used());
  w.gamma = arena.take<T>(p.lse_size());
  return w;
}

// Values shared by the elements of one row.
template <class T>
struct SecondOrderRow {
  T reference, correction, delta, mu, gamma;
};

template <class In_, class T_>
struct DoubleBackwardPass {
  using In = In_;
  using T = T_;
  using Params = DoubleBackwardParams;
  using Workspace = DoubleBackwardWorkspace<T>;

  const Params& p;
  const Workspace& w;
  const BackwardParams with_t_q, with_t_kv;
  DoubleBackwardScratch<In, T> s;

  DoubleBackwardPass(const Params& call, const Params& params, const Workspace& workspace, int thread)
      : p(params),
        w(workspace),
        with_t_q(with_inputs<BackwardParams>(p, p.tangents.q, p.k, p.v)),
        with_t_kv(with_inputs<BackwardParams>(p, p.q, p.tangents.k, p.tangents.v)) {
    Arena arena = thread_arena<T>(w, thread);
    s = allocate_double_backward<In, T>(arena, call);
  }

  void undo_functions(const TileFrame&) {}  // cpu/why_not.cpp excludes these calls

  void load_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t keys) {
    s.products.load_keys(p, b, h_kv, j0, keys);
    s.t_products.load_keys(with_t_kv, b, h_kv, j0, keys);
  }

  // Calls use(score) for a tile that is not masked, with G in s.dscores, R P (e - mu) in s.probs and dS in s.t_scores.
  template <class Use>
  void recompute(const TileFrame& whole, const Use& use) {
    for_each_part<In, T>(p, s, whole, [&](const ScoreTile<T>& score) {
      finish_tile(score.frame);
      use(score);
    });
  }

  void add_products(const ScoreTile<T>& score, const DqRows<T>& dq, const Turn& turn) {
    const TileFrame& f = score.frame;
    if (p.dv) s.t_products.add_dv(p, score, s.probs, s.dv);
    unscale_dscores<T>(p, f, s.tanh_tile, s.dscores);
    unscale_dscores<T>(p, f, s.tanh_tile, s.t_scores);
    if (s.curvature) {
      const T scale = static_cast<T>(p.scale);
      for (int64_t n = 0; n < f.queries * f.ld; n += kLanes<T>)
        store<T>(s.dscores + n, load<T>(s.dscores + n) + scale * load<T>(s.curvature + n));
    }
    if (p.dk) {
      s.t_products.add_dk(p, score, s.dscores, s.dk);
      s.products.add_dk(with_t_q, score, s.t_scores, s.dk);
    }
    if (p.dq) {
      turn.wait_for(step_of_tile<T>(p, f));
      s.products.add_dq(p, score, s.dscores, dq);
      s.t_products.add_dq(with_t_kv, score, s.t_scores, dq);
    }
  }

 private:
  // Replaces the scores of a tile by R P (e - mu), and computes G and dS.
  void finish_tile(const TileFrame& f) {
    s.products.dprobs(p, f, s.dscores);
    s.t_products.dprobs(with_t_kv, f, s.t_dprobs);
    s.t_products.scores(with_t_kv, f, s.t_scores);
    s.products.scores(with_t_q, f, s.t_scores, true);
    finish_tangents<T>(p, p.tangents, f, s.tanh_tile, s.t_mask_tile, s.t_scores, s.curvature);
    if (p.dropout) {
      load_dropout_tile<T>(p, f, s.dropout_tile);
      for (T* product : {s.dscores, s.t_dprobs}) multiply_rows<T>(product, s.dropout_tile, f.queries * f.ld);
    }
    const RowTerms<T> rows = w.rows.of_head(p, f.b, f.h);
    const int64_t at = p.lse_index(f.b, f.h, 0);
    for (int64_t r = 0; r < f.queries; ++r) {
      const int64_t i = f.i0 + r;
      finish_row_of_tile(f, r,
                         {rows.reference[i], rows.correction[i], rows.delta[i],
                          static_cast<const T*>(p.t_lse)[at + i], w.gamma[at + i]});
    }
    if (p.dropout) multiply_rows<T>(s.probs, s.dropout_tile, f.queries * f.ld);
  }

  // Computes one row of the tile. Masked elements and padding become 0, also if they are NaN.
  void finish_row_of_tile(const TileFrame& f, int64_t r, const SecondOrderRow<T>& row) const {
    for (int64_t n = r * f.ld; n < (r + 1) * f.ld; n += kLanes<T>) {
      const Vec<T> x = load<T>(s.probs + n), g = load<T>(s.dscores + n), e = load<T>(s.t_scores + n);
      const VecIndex<T> hidden = x == kNegInf<T>;
      const Vec<T> prob = exp<T>((x - row.reference) - row.correction, Exp2<T>::kLowestProb),
                   from_delta = g - row.delta, dscore = prob * from_delta;
      const Vec<T> a = from_delta * e + load<T>(s.t_dprobs + n) - row.mu * g;
      store<T>(s.probs + n, hidden ? Vec<T>{} : prob * (e - row.mu));
      store<T>(s.dscores + n, hidden ? Vec<T>{} : prob * (a - row.gamma));
      store<T>(s.t_scores + n, hidden ? Vec<T>{} : dscore);
      if (s.curvature) store<T>(s.curvature + n, hidden ? Vec<T>{} : dscore * load<T>(s.curvature + n));
    }
  }
};

template <class In, class T>
void compute_gamma(const DoubleBackwardParams& call, const DoubleBackwardWorkspace<T>& w,
                   const Parallel& parallel) {
  const int64_t heads = call.sizes.heads;
  for_each_task(parallel, call.sizes.batch * heads, [&](int64_t head, int) {
    const int64_t b = head / heads, h = head % heads;
    const DoubleBackwardParams p = of_sequence(call, b);
    const RowTerms<T> rows = w.rows.of_head(p, b, h);
    const int64_t at = p.lse_index(b, h, 0);
    for (int64_t i = 0; i < p.sizes.seqlen_q; ++i) {
      const T mu = static_cast<const T*>(p.t_lse)[at + i];
      w.gamma[at + i] =
          dot_rows_of<In, T>(p.dout, p.t_out, p.dtype, b, h, i, p.sizes.head_dim_v) - mu * rows.delta[i];
    }
  });
}

template <class In, class T>
void double_backward(const DoubleBackwardParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const DoubleBackwardWorkspace<T> w = allocate_double_backward_pass<In, T>(arena, p, parallel.threads);
  compute_row_terms<In, T>(p, w, parallel);
  compute_gamma<In, T>(p, w, parallel);
  if (p.dsink)
    sink_gradient(p, w, parallel, [&](const DoubleBackwardParams& own, int64_t b, int64_t h, int64_t i) {
      const T t_sink = own.tangents.sink ? own.tangents.sink.of<T>(b, h) : T(0);
      return w.rows.of_head(own, b, h).delta[i] * t_sink + w.gamma[own.lse_index(b, h, i)];
    });
  backward_passes<DoubleBackwardPass<In, T>>(p, w, parallel);
}

template <class In, class T>
size_t double_backward_workspace(const DoubleBackwardParams& p, int threads) {
  Arena arena(nullptr);
  allocate_double_backward_pass<In, T>(arena, p, threads);
  return arena.used();
}
