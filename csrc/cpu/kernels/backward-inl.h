// Backward of q, k, v and the ALiBi slopes: FlashAttention-2, algorithm 2, five products a tile and no
// atomics.
//
//   dV_j += P^T dO    dK_j += dS^T Q    dQ_i += dS K       key block j outside, query block i inside
//
// One task owns one (sequence, query head) and every `chunks`-th key block of it, with a dQ accumulator of
// its own. The number of chunks depends on the shape alone, and partial sums are added in order: the result
// is bitwise the same for any number of threads.
#pragma once

#include "backward_mask-inl.h"

// Row maxima and sums of the scores, for a block of queries that holds an lse too large to be exact. A second
// look at the scores, taken only there.
template <class In, class T>
void recompute_row_sums(const BackwardParams& p, BackwardScratch<In, T>& s, int64_t b, int64_t h, int64_t i0,
                        int64_t queries, const RowTerms<T>& rows) {
  const int64_t block_k = backward_tiling<T>().block_k;
  std::fill(rows.reference + i0, rows.reference + i0 + queries, kNegInf<T>);
  std::fill(rows.correction + i0, rows.correction + i0 + queries, T(0));  // the sum, until the end
  const Range seen = visible_keys(p.band, i0, i0 + queries, p.sizes.seqlen_k);
  for (int64_t j0 = seen.begin / block_k * block_k; j0 < seen.end; j0 += block_k) {
    const int64_t keys = std::min(block_k, p.sizes.seqlen_k - j0);
    const TileFrame f{b, h, i0, j0, queries, keys, round_up_to_lanes<T>(keys), false};
    s.products.load_keys(p, b, p.sizes.kv_head(h), j0, keys);
    if (recompute_scores<In, T>(p, s, f).empty) continue;
    for (int64_t r = 0; r < queries; ++r) {
      const T* scores = s.probs + r * f.ld;
      T &row_max = rows.reference[i0 + r], &sum = rows.correction[i0 + r];
      const T new_max = std::max(row_max, *std::max_element(scores, scores + keys));
      if (new_max == kNegInf<T>) continue;
      sum *= std::exp(row_max - new_max);
      for (int64_t c = 0; c < keys; ++c) sum += std::exp(scores[c] - new_max);
      row_max = new_max;
    }
  }
  for (int64_t i = i0; i < i0 + queries; ++i) rows.correction[i] = std::log(rows.correction[i]);
}

template <class In, class T>
void compute_row_terms(const BackwardParams& call, const BackwardWorkspace<T>& w, const Parallel& parallel) {
  for_each_task(parallel, w.row_tasks.total, [&](int64_t n, int thread) {
    constexpr int64_t block_q = backward_tiling<T>().block_q;
    const auto [b, task] = w.row_tasks.at(n);
    const BackwardParams p = of_sequence(call, b);
    const int64_t blocks = count_query_blocks<T>(p), h = task / blocks, i0 = task % blocks * block_q;
    const int64_t queries = std::min(block_q, p.sizes.seqlen_q - i0);
    const RowTerms<T> rows = w.rows.of_head(p, b, h);
    bool exact = true;
    for (int64_t i = i0; i < i0 + queries; ++i) {
      const int64_t at = p.statistics_row(b, h, i);
      const T dlse = p.dlse ? static_cast<const T*>(p.dlse)[at] : T(0);
      rows.delta[i] =
          dot_rows<In, T>(p.dout.row<In>(b, h, i), p.out.row<In>(b, h, i), p.sizes.head_dim_v) - dlse;
      const T lse = static_cast<const T*>(p.lse)[at];
      rows.reference[i] = lse == kNegInf<T> ? -kNegInf<T> : lse;
      rows.correction[i] = T(0);
      exact &= lse_is_exact(p, lse);
    }
    if (exact) return;
    BackwardScratch<In, T> s = thread_scratch<In, T>(call, w, thread);
    recompute_row_sums<In, T>(p, s, b, h, i0, queries, rows);
  });
}

// d(score)/d(slope) = -|i + diagonal - j|, summed over the tile.
template <class T>
T alibi_slope_gradient(const BackwardParams& p, const TileFrame& f, const T* dscores) {
  Vec<T> sum = {};
  for (int64_t r = 0; r < f.queries; ++r)
    for (int64_t c = 0; c < f.ld; c += kLanes<T>)
      sum -= load<T>(dscores + r * f.ld + c) * alibi_distance<T>(p.band, f, r, c);
  return sum_lanes<T>(sum);
}

// From the gradient of the finished score to that of <q, k>: through the softcap, times scale.
template <class T>
void unscale_dscores(const BackwardParams& p, const TileFrame& f, const T* tanh_tile, T* dscores) {
  const T scale = static_cast<T>(p.scale);
  for (int64_t c = 0; c < f.queries * f.ld; c += kLanes<T>) {
    Vec<T> ds = load<T>(dscores + c) * scale;
    if (tanh_tile) {
      const Vec<T> t = load<T>(tanh_tile + c), slope = T(1) - t * t;
      ds = ds == T(0) ? ds : ds * slope;  // a masked 0 stays 0 where tanh is NaN
    }
    store<T>(dscores + c, ds);
  }
}

template <class In, class T>
void backward_key_block(const BackwardParams& p, BackwardScratch<In, T>& s, int64_t b, int64_t h, int64_t j0,
                        const RowTerms<T>& rows, T* dq, T& dslope) {
  const auto [block_q, block_k] = backward_tiling<T>();
  const Sizes& z = p.sizes;
  const int64_t h_kv = z.kv_head(h), keys = std::min(block_k, z.seqlen_k - j0),
                ld = round_up_to_lanes<T>(keys);
  const int64_t d = round_up_to_lanes<T>(z.head_dim), d_v = round_up_to_lanes<T>(z.head_dim_v);
  std::fill(s.dk, s.dk + keys * d, T(0));
  std::fill(s.dv, s.dv + keys * d_v, T(0));

  const Range seen = visible_queries(p.band, j0, j0 + keys, z.seqlen_q);
  if (seen.begin >= seen.end) return;
  s.products.load_keys(p, b, h_kv, j0, keys);

  for (int64_t i0 = seen.begin / block_q * block_q; i0 < seen.end; i0 += block_q) {
    const TileFrame f{b, h, i0, j0, std::min(block_q, z.seqlen_q - i0), keys, ld, false};
    const BackwardTile<T> tile = recompute_tile<In, T>(p, s, f, rows);
    if (tile.empty) continue;
    if (p.dv) s.products.add_dv(p, tile.score, s.probs, s.dv);
    if (p.dalibi_slopes) dslope += alibi_slope_gradient<T>(p, f, s.dscores);
    unscale_dscores<T>(p, f, s.tanh_tile, s.dscores);
    if (p.dk) s.products.add_dk(p, tile.score, s.dscores, s.dk);
    if (p.dq) s.products.add_dq(p, tile.score, s.dscores, dq + i0 * d);
  }
}

// The key rows of one block, straight to dk and dv, or to the query head's own partial sum where heads share
// keys.
template <class In, class T>
void store_key_rows(const Tensor4& grad, T* partial, const T* block, int64_t b, int64_t h, const Sizes& z,
                    int64_t j0, int64_t keys, int64_t cols) {
  const int64_t ld = round_up_to_lanes<T>(cols);
  if (!grad) return;
  if (z.heads != z.heads_kv) {
    std::copy(block, block + keys * ld, partial + (h * z.seqlen_k + j0) * ld);
  } else {
    for (int64_t j = 0; j < keys; ++j)
      store_row<In, T>(grad.row<In>(b, h, j0 + j), block + j * ld, cols, T(1));
  }
}

template <class In, class T>
void backward_qkv(const BackwardParams& call, const BackwardWorkspace<T>& w, const Parallel& parallel) {
  for_each_task(parallel, w.key_tasks.total, [&](int64_t n, int thread) {
    constexpr int64_t block_k = backward_tiling<T>().block_k;
    BackwardScratch<In, T> s = thread_scratch<In, T>(call, w, thread);
    const auto [b, task] = w.key_tasks.at(n);
    const BackwardParams p = of_sequence(call, b);
    const Sizes& z = p.sizes;
    const int64_t chunks = backward_chunks<T>(p), h = task / chunks, chunk = task % chunks;
    const int64_t dq_rows = z.seqlen_q * round_up_to_lanes<T>(z.head_dim);
    T* dq = p.dq ? w.dq_of(p, b) + (chunk * z.heads + h) * dq_rows : nullptr;
    if (dq) std::fill(dq, dq + dq_rows, T(0));
    T dslope = 0;
    for (int64_t j0 = chunk * block_k; j0 < z.seqlen_k; j0 += chunks * block_k) {
      backward_key_block<In, T>(p, s, b, h, j0, w.rows.of_head(p, b, h), dq, dslope);
      const int64_t keys = std::min(block_k, z.seqlen_k - j0);
      store_key_rows<In, T>(p.dk, w.dk_of(p, b), s.dk, b, h, z, j0, keys, z.head_dim);
      store_key_rows<In, T>(p.dv, w.dv_of(p, b), s.dv, b, h, z, j0, keys, z.head_dim_v);
    }
    if (p.dalibi_slopes) w.dslopes_of(p, b)[h * w.chunks + chunk] = dslope;
  });
}

// Each row of head h of `grad` is the sum of `parts` partial rows of `data`, added in order; the parts lie
// `part_rows` rows behind each other, and the first is overwritten.
template <class In, class T>
void reduce_rows(const Tensor4& grad, T* data, int64_t b, int64_t h, int64_t seqlen, int64_t cols,
                 int64_t parts, int64_t part_rows) {
  const int64_t ld = round_up_to_lanes<T>(cols);
  for (int64_t s = 0; s < seqlen; ++s) {
    T* sum = data + s * ld;
    for (int64_t n = 1; n < parts; ++n) add_rows<T>(sum, sum + n * part_rows * ld, ld);
    store_row<In, T>(grad.row<In>(b, h, s), sum, cols, T(1));
  }
}

template <class In, class T>
void reduce_gradients(const BackwardParams& call, const BackwardWorkspace<T>& w, const Parallel& parallel) {
  const int64_t heads = call.sizes.heads;
  for_each_task(parallel, call.sizes.batch * heads, [&](int64_t task, int) {
    const int64_t b = task / heads, h = task % heads;
    const BackwardParams p = of_sequence(call, b);
    const Sizes& z = p.sizes;
    const int64_t chunks = backward_chunks<T>(p), group = heads / z.heads_kv;
    const int64_t d = round_up_to_lanes<T>(z.head_dim), d_v = round_up_to_lanes<T>(z.head_dim_v);
    if (p.dq)
      reduce_rows<In, T>(p.dq, w.dq_of(p, b) + h * z.seqlen_q * d, b, h, z.seqlen_q, z.head_dim, chunks,
                         heads * z.seqlen_q);
    if (group > 1 && h % group == 0) {  // the heads of the group are the parts
      if (p.dk)
        reduce_rows<In, T>(p.dk, w.dk_of(p, b) + h * z.seqlen_k * d, b, h / group, z.seqlen_k, z.head_dim,
                           group, z.seqlen_k);
      if (p.dv)
        reduce_rows<In, T>(p.dv, w.dv_of(p, b) + h * z.seqlen_k * d_v, b, h / group, z.seqlen_k, z.head_dim_v,
                           group, z.seqlen_k);
    }
    if (p.dalibi_slopes) {
      T sum = 0;
      for (int64_t n = 0; n < chunks; ++n) sum += w.dslopes_of(p, b)[h * w.chunks + n];
      static_cast<T*>(p.dalibi_slopes)[b * heads + h] = sum;
    }
  });
}

template <class In, class T>
void backward(const BackwardParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const BackwardWorkspace<T> w = plan_backward_workspace<In, T>(arena, p, parallel.threads);
  compute_row_terms<In, T>(p, w, parallel);
  if (p.wants_qkv_pass()) {
    backward_qkv<In, T>(p, w, parallel);
    reduce_gradients<In, T>(p, w, parallel);
  }
  if (p.dmask) backward_mask<In, T>(p, w, parallel);
}

template <class In, class T>
size_t backward_workspace(const BackwardParams& p, int threads) {
  Arena arena(nullptr);
  plan_backward_workspace<In, T>(arena, p, threads);
  return arena.used();
}
