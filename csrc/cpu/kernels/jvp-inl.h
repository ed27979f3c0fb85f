// Forward mode: computes out, lse and their tangents in one loop over the tiles (docs/derivative_formulas.md). It is
// the forward's loop with two more sums, rescaled like O and l:
//
//   e  = tangent of S      r = r e^(m - m') + rowsum P o e      mu' = r / l
//   tO = (tO - (mu' - mu) O) e^(m - m') + (P o (e - mu')) V + P tV
//   at the end t_lse = mu and t_out = tO / l
//
// The running mean mu of e is subtracted in tO. Otherwise a large mean of e would cancel at the end and lose
// precision.
#pragma once

#include "forward-inl.h"
#include "tangents-inl.h"

template <class In, class T>
struct JvpScratch {
  ForwardScratch<In, T> primal;
  ForwardProducts<In, T> t_products;  // with t_q for q
  T* t_scores;                        // [block_k][block_q]   e^T, then (P o (e - mu))^T in place
  T* tanh_tile;                       // [block_k][block_q]   only with softcap
  T* t_mask_tile;                     // [block_k][block_q]   only with a tangent of the mask
  T* t_out;                           // [block_q][D_v]       tO
  T* t_sum;                           // [block_q]            r
  T* t_mean;                          // [block_q]            mu
  T* t_shift;                         // [block_q]            mu' - mu
};

template <class In, class T>
JvpScratch<In, T> allocate_jvp(Arena& arena, const JvpParams& p) {
  const auto [block_q, block_k] = fitted(forward_tiling<T>(), p.sizes);
  JvpScratch<In, T> s;
  s.primal = allocate_forward<In, T>(arena, p);
  s.t_products = ForwardProducts<In, T>::allocate(arena, p);
  s.t_scores = arena.take<T>(block_k * block_q);
  s.tanh_tile = p.softcap > 0 ? arena.take<T>(block_k * block_q) : nullptr;
  s.t_mask_tile = p.tangents.mask ? arena.take<T>(block_k * block_q) : nullptr;
  s.t_out = arena.take<T>(block_q * round_up_to_lanes<T>(p.sizes.head_dim_v));
  for (T** row : {&s.t_sum, &s.t_mean, &s.t_shift}) *row = arena.take<T>(block_q);
  return s;
}

// online_softmax() with the tangent: also replaces e by P o (e - mu'). The e of a masked element may be NaN.
template <class In, class T>
inline void online_softmax_jvp(const TileFrame& f, const JvpScratch<In, T>& scratch) {
  constexpr int L = kLanes<T>;
  const ForwardScratch<In, T>& s = scratch.primal;
  for (int64_t c = 0; c < f.ld; c += L) {
    const Vec<T> old_max = load<T>(s.row_max + c);
    const Vec<T> new_max = max<T>(old_max, max_of_column<T>(s.scores + c, f.keys, f.ld));
    const Vec<T> reference = new_max == kNegInf<T> ? Vec<T>{} : new_max;
    Vec<T> sum = {}, t_sum = {};
    for (int64_t n = c; n < f.keys * f.ld; n += f.ld) {
      const Vec<T> x = load<T>(s.scores + n), prob = exp<T>(x - reference, Exp2<T>::kLowestProb);
      const Vec<T> e = x == kNegInf<T> ? Vec<T>{} : load<T>(scratch.t_scores + n);
      store<T>(s.scores + n, prob);
      store<T>(scratch.t_scores + n, e);
      sum += prob;
      t_sum += prob * e;
    }
    const Vec<T> factor = exp<T>(old_max - reference);
    sum += load<T>(s.row_sum + c) * factor;
    t_sum += load<T>(scratch.t_sum + c) * factor;
    const Vec<T> mean = sum == T(0) ? Vec<T>{} : t_sum / sum;
    for (int64_t n = c; n < f.keys * f.ld; n += f.ld)
      store<T>(scratch.t_scores + n, load<T>(s.scores + n) * (load<T>(scratch.t_scores + n) - mean));

    store<T>(s.row_max + c, new_max);
    store<T>(s.row_sum + c, sum);
    store<T>(s.rescale + c, factor);
    store<T>(scratch.t_sum + c, t_sum);
    store<T>(scratch.t_shift + c, mean - load<T>(scratch.t_mean + c));
    store<T>(scratch.t_mean + c, mean);
  }
}

// row -= factor * other_row, over whole vectors.
template <class T>
inline void subtract_rows(T* row, T factor, const T* other, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes<T>)
    store<T>(row + c, load<T>(row + c) - factor * load<T>(other + c));
}

template <class In, class T>
void jvp_query_block(const JvpParams& p, const JvpScratch<In, T>& scratch, int64_t b, int64_t h, int64_t i0) {
  const Tiling tiling = forward_tiling<T>();
  const Sizes& z = p.sizes;
  const Tangents& t = p.tangents;
  const ForwardScratch<In, T>& s = scratch.primal;
  const AttentionParams with_t_q = with_inputs<AttentionParams>(p, t.q, p.k, p.v);
  const AttentionParams with_t_kv = with_inputs<AttentionParams>(p, p.q, t.k, t.v);
  const T scale = product_scale<T>(p);
  const int64_t d_v = round_up_to_lanes<T>(z.head_dim_v);
  const int64_t queries = std::min(tiling.block_q, z.seqlen_q - i0);
  const int64_t ld = round_up_to_lanes<T>(queries);

  s.products.load_queries(p, b, h, i0, queries, ld);
  if (t.q) scratch.t_products.load_queries(with_t_q, b, h, i0, queries, ld);
  const RowStart<T> start = start_of_row<T>(p.sink, b, h);
  std::fill(s.row_max, s.row_max + ld, start.max);
  std::fill(s.row_sum, s.row_sum + ld, start.sum);
  const T t_start = t.sink && start.sum != T(0) ? t.sink.of<T>(b, h) : T(0);
  for (T* sum : {scratch.t_sum, scratch.t_mean}) std::fill(sum, sum + ld, t_start);
  for (T* sum : {s.out, scratch.t_out}) std::fill(sum, sum + queries * d_v, T(0));

  const Range keys = keys_of_tiles(p, i0, queries);
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += tiling.block_k) {
    const TileFrame f{b, h, i0, j0, queries, std::min(tiling.block_k, keys.end - j0), ld, true};
    const MaskTile<T> mask = load_mask_tile<T>(p.mask, f, s.mask);
    if (mask.masked == TileMask::kAll) continue;

    const KeyStairs stairs(f);
    s.products.scores(p, f, stairs, scale, s.scores);
    const ScoreTile<T> score = finish_scores<T>(p, f, mask, s.scores, scratch.tanh_tile);

    if (t.q) scratch.t_products.scores(with_t_q, f, stairs, scale, scratch.t_scores);
    if (t.k) s.products.scores(with_t_kv, f, stairs, scale, scratch.t_scores, static_cast<bool>(t.q));
    if (!t.q && !t.k) std::fill(scratch.t_scores, scratch.t_scores + f.keys * ld, T(0));
    finish_tangents<T>(p, t, f, scratch.tanh_tile, scratch.t_mask_tile, scratch.t_scores, nullptr);

    online_softmax_jvp<In, T>(f, scratch);
    if (p.dropout) {
      load_dropout_tile<T>(p, f, s.dropout_tile);
      for (T* probs : {s.scores, scratch.t_scores}) multiply_rows<T>(probs, s.dropout_tile, f.keys * ld);
    }

    for (int64_t i = 0; i < queries; ++i)
      subtract_rows<T>(scratch.t_out + i * d_v, scratch.t_shift[i], s.out + i * d_v, d_v);
    s.products.add_values(p, score, stairs, s.scores, s.rescale, s.out);
    s.products.add_values(p, score, stairs, scratch.t_scores, s.rescale, scratch.t_out);
    if (t.v) s.products.add_values(with_t_kv, score, stairs, s.scores, nullptr, scratch.t_out);
  }

  const int64_t at = p.lse_index(b, h, i0);
  T *lse = static_cast<T*>(p.lse) + at, *t_lse = static_cast<T*>(p.t_lse) + at;
  for_row_type<In>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    for (int64_t i = 0; i < queries; ++i) {
      finish_row<Row, T>(p.out.row<Row>(b, h, i0 + i), s.out + i * d_v, z.head_dim_v, s.row_max[i], T(1),
                         s.row_sum[i], lse[i]);
      const T sum = s.row_sum[i];  // 0: no key is visible, and the tangents are 0
      store_row<Row, T>(p.t_out.row<Row>(b, h, i0 + i), scratch.t_out + i * d_v, z.head_dim_v,
                        sum == T(0) ? T(0) : T(1) / sum);
      t_lse[i] = scratch.t_mean[i];
    }
  });
}

struct JvpWorkspace {
  TaskList tasks;  // query blocks of each head
  ThreadScratch scratch;
};

template <class In, class T>
JvpWorkspace allocate_jvp_workspace(Arena& arena, const JvpParams& call, int threads) {
  JvpWorkspace w;
  w.tasks = list_tasks(arena, call, [](const JvpParams& p) {
    return p.sizes.batch * p.sizes.heads * ceil_div(p.sizes.seqlen_q, forward_tiling<T>().block_q);
  });
  w.scratch = ThreadScratch::allocate(arena, threads, [&](Arena& one) { allocate_jvp<In, T>(one, call); });
  return w;
}

template <class In, class T>
void jvp(const JvpParams& call, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const JvpWorkspace w = allocate_jvp_workspace<In, T>(arena, call, parallel.threads);
  for_each_task(parallel, w.tasks.total, [&](int64_t n, int thread) {
    const TaskList::Task task = w.tasks.at(n);
    const JvpParams p = of_sequence(call, task.b);
    Arena scratch = w.scratch.of_thread(thread);
    const ProductUnit<In> unit;
    constexpr int64_t block_q = forward_tiling<T>().block_q;
    const HeadBlocks list = query_blocks(p.sizes, ceil_div(p.sizes.seqlen_q, block_q), parallel.threads);
    const auto [b, h, n_from_last] = list.at(task);
    const int64_t block = list.blocks - 1 - n_from_last;
    jvp_query_block<In, T>(p, allocate_jvp<In, T>(scratch, call), b, h, block * block_q);
  });
}

template <class In, class T>
size_t jvp_workspace(const JvpParams& p, int threads) {
  Arena arena(nullptr);
  allocate_jvp_workspace<In, T>(arena, p, threads);
  return arena.used();
}
