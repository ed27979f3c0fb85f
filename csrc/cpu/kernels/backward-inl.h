// Backward of q, k, v and the ALiBi slopes: FlashAttention-2, algorithm 2, five products per tile and no atomics.
//
//   dV_j += P^T dO    dK_j += dS^T Q    dQ_i += dS K       outer loop: key block j; inner loop: query block i
//
// A task processes all keys, or one block of keys, for some query heads that share a key head. The tasks of a head add to
// the same dQ, in the order of the keys (turns.h). So the bits do not depend on the number of threads or on the batch.
#pragma once

#include "backward_captured-inl.h"

// Adds one tile to the row terms. `reference` is the running maximum m. `correction` is l = sum of e^(S - m). `delta`
// is the sum of e^(S - m) dP.
template <class T>
void add_to_row_terms(const TileFrame& f, const T* scores, const T* dprobs, const T* dropout_tile,
                      const RowTerms<T>& rows) {
  for (int64_t r = 0; r < f.queries; ++r) {
    const int64_t i = f.i0 + r, row = r * f.ld;
    const T new_max = std::max(rows.reference[i], *std::max_element(scores + row, scores + row + f.keys));
    if (new_max == kNegInf<T>) continue;
    Vec<T> sum = {}, weighted = {};
    for (int64_t n = row; n < row + f.ld; n += kLanes<T>) {
      const Vec<T> x = load<T>(scores + n), prob = exp<T>(x - new_max, Exp2<T>::kLowestProb),
                   dprob = load<T>(dprobs + n);
      const Vec<T> product = prob * (dropout_tile ? dprob * load<T>(dropout_tile + n) : dprob);
      sum += prob;
      weighted += x == kNegInf<T> ? Vec<T>{} : product;  // masked: 0 for every dP
    }
    const T rescale = std::exp(rows.reference[i] - new_max);
    rows.correction[i] = rows.correction[i] * rescale + sum_lanes<T>(sum);
    rows.delta[i] = rows.delta[i] * rescale + sum_lanes<T>(weighted);
    rows.reference[i] = new_max;
  }
}

// Computes the row terms of a query block from recomputed scores. The results are sums: m in rows.reference, l in
// rows.correction, l rowsum(P o dP) in rows.delta.
template <class In, class T>
void sum_row_terms(const BackwardParams& p, BackwardScratch<In, T>& s, int64_t b, int64_t h, int64_t i0,
                   int64_t queries, const RowTerms<T>& rows) {
  const int64_t block_k = backward_tiling<T>().block_k;
  const RowStart<T> start = start_of_row<T>(p.sink, b, h);
  std::fill(rows.reference + i0, rows.reference + i0 + queries, start.max);
  std::fill(rows.correction + i0, rows.correction + i0 + queries, start.sum);
  std::fill(rows.delta + i0, rows.delta + i0 + queries, T(0));
  const Range seen = visible_keys(p.band, i0, i0 + queries, p.sizes.seqlen_k);
  for (int64_t j0 = seen.begin / block_k * block_k; j0 < seen.end; j0 += block_k) {
    const int64_t keys = std::min(block_k, p.sizes.seqlen_k - j0);
    s.products.load_keys(p, b, p.sizes.kv_head(h), j0, keys);
    const TileFrame whole{b, h, i0, j0, queries, keys, round_up_to_lanes<T>(keys), false};
    for_each_part<In, T>(p, s, whole, [&](const ScoreTile<T>& score) {
      const TileFrame& f = score.frame;
      load_dprobs<In, T>(p, s, f);
      if (p.dropout) load_dropout_tile<T>(p, f, s.dropout_tile);
      add_to_row_terms<T>(f, s.probs, s.dscores, s.dropout_tile, rows);
    });
  }
}

// Sets rows of dQ to 0 before the sums.
template <class T>
void clear_rows(const DqRows<T>& dq, int64_t i0, int64_t count, int64_t cols) {
  for (int64_t i = i0; dq.data && i < i0 + count; ++i)
    std::fill(dq.data + i * dq.ld, dq.data + i * dq.ld + round_up_to_lanes<T>(cols), T(0));
}

template <class In, class T>
void compute_row_terms(const BackwardParams& call, const BackwardWorkspace<T>& w, const Parallel& parallel) {
  for_each_task(parallel, w.row_tasks.total, [&](int64_t n, int thread) {
    constexpr int64_t block_q = backward_tiling<T>().block_q;
    const TaskList::Task task = w.row_tasks.at(n);
    const BackwardParams p = of_sequence(call, task.b);
    const auto [b, h, block] = HeadBlocks(p.sizes, count_query_blocks<T>(p), 1).at(task);
    const int64_t i0 = block * block_q;
    const int64_t queries = std::min(block_q, p.sizes.seqlen_q - i0), first = p.lse_index(b, h, i0);
    const RowTerms<T> rows = w.rows.of_head(p, b, h);
    const T *lse = static_cast<const T*>(p.lse) + first,
            *dlse = static_cast<const T*>(p.dlse) + (p.dlse ? first : 0);
    // With dweights there is no out, so delta cannot be dot(dO, O).
    const bool exact =
        !p.dweights && std::all_of(lse, lse + queries, [&](T x) { return lse_is_exact(p, x); });
    if (!exact) {
      Arena arena = thread_arena(w, thread);
      BackwardScratch<In, T> s = allocate_backward<In, T>(arena, call);
      const ProductUnit<In> unit;
      sum_row_terms<In, T>(p, s, b, h, i0, queries, rows);
    }
    if (!w.whole_heads) clear_rows(w.template dq_of<In>(p, b, h), i0, queries, p.sizes.head_dim);
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t i = i0 + r;
      if (exact || !std::isfinite(lse[r])) {
        rows.delta[i] = dot_rows_of<In, T>(p.dout, p.out, p.dtype, b, h, i, p.sizes.head_dim_v);
        rows.reference[i] = lse[r] == kNegInf<T> ? -kNegInf<T> : lse[r];
        rows.correction[i] = T(0);
      } else {
        rows.delta[i] /= rows.correction[i];
        rows.correction[i] = std::log(rows.correction[i]);
      }
      if (p.dlse) rows.delta[i] -= dlse[r];
    }
  });
}

// Computes the sink's gradient for each head: dsink -= P term(p, b, h, i), summed over the rows i. Its column of dS is
// P (0 - delta), so the term is delta in the first derivative. `p` is the call of sequence b.
template <class Params, class T, class Term>
void sink_gradient(const Params& call, const BackwardWorkspace<T>& w, const Parallel& parallel,
                   const Term& term) {
  const int64_t heads = call.sizes.heads;
  for_each_task(parallel, call.sizes.batch * heads, [&](int64_t head, int) {
    const int64_t b = head / heads, h = head % heads;
    const Params p = of_sequence(call, b);
    const RowTerms<T> rows = w.rows.of_head(p, b, h);
    const T sink = p.sink.template of<T>(b, h);
    T sum = 0;
    for (int64_t i = 0; sink != kNegInf<T> && i < p.sizes.seqlen_q; ++i)
      sum -= std::exp((sink - rows.reference[i]) - rows.correction[i]) * term(p, b, h, i);
    static_cast<T*>(p.dsink)[head] = sum;
  });
}

// d(score)/d(slope) = -|i + diagonal - j|, times dS, summed over the tile.
template <class T>
T alibi_slope_gradient(const BackwardParams& p, const TileFrame& f, const T* dscores) {
  Vec<T> sum = {};
  for (int64_t r = 0; r < f.queries; ++r)
    for (int64_t c = 0; c < f.ld; c += kLanes<T>)
      sum -= load<T>(dscores + r * f.ld + c) * alibi_distance<T>(p.band, f, r, c);
  return sum_lanes<T>(sum);
}

// Converts the gradient of the scores to the gradient of <q, k>: multiplies by the derivative of the softcap and by
// scale.
template <class T>
void unscale_dscores(const BackwardParams& p, const TileFrame& f, const T* tanh_tile, T* dscores) {
  const T scale = static_cast<T>(p.scale);
  for (int64_t c = 0; c < f.rows() * f.ld; c += kLanes<T>) {
    Vec<T> ds = load<T>(dscores + c) * scale;
    if (tanh_tile) {
      const Vec<T> t = load<T>(tanh_tile + c), slope = T(1) - t * t;
      ds = ds == T(0) ? ds : ds * slope;  // a masked 0 stays 0, even if tanh is NaN
    }
    store<T>(dscores + c, ds);
  }
}

// One tile of the first derivative, on one thread. The loops below have this class as a template parameter;
// double_backward-inl.h has the class of the second derivative.
template <class In_, class T_>
struct BackwardPass {
  using In = In_;
  using T = T_;
  using Params = BackwardParams;
  using Workspace = BackwardWorkspace<T>;

  const Params& p;
  const Workspace& w;
  BackwardScratch<In, T> s;

  // `params` is the call of one sequence of `call`.
  BackwardPass(const Params& call, const Params& params, const Workspace& workspace, int thread)
      : p(params), w(workspace) {
    Arena arena = thread_arena(w, thread);
    s = allocate_backward<In, T>(arena, call);
    if (w.kept[thread]) s.mask.functions.kept = &w.kept[thread];
  }

  void load_keys(int64_t b, int64_t h_kv, int64_t j0, int64_t keys) {
    s.products.load_keys(p, b, h_kv, j0, keys);
  }

  // Calls use(score) for each part of a tile that is not masked, with the gradient of the scores in s.dscores.
  template <class Use>
  void recompute(const TileFrame& whole, const Use& use) {
    for_each_part<In, T>(p, s, whole, [&](const ScoreTile<T>& score) {
      finish_tile<In, T>(p, s, score.frame, w.rows.of_head(p, whole.b, whole.h));
      use(score);
    });
  }

  // Converts the gradient of the finished scores to the gradient of the scores before the user's function.
  void undo_functions(const TileFrame& f) {
    if (p.functions && p.functions->score) apply_gradient_function<T>(p, f, s.mask.functions, s.dscores);
  }

  // Adds to s.dk and s.dv. Waits for its turn, then adds to dq.
  void add_products(const ScoreTile<T>& score, const DqRows<T>& dq, const Turn& turn) {
    const TileFrame& f = score.frame;
    if (p.dv) s.products.add_dv(p, score, s.probs, s.dv);
    unscale_dscores<T>(p, f, s.tanh_tile, s.dscores);
    if (p.dk) s.products.add_dk(p, score, s.dscores, s.dk);
    if (!p.dq) return;
    turn.wait_for(step_of_tile<T>(p, f));
    s.products.add_dq(p, score, s.dscores, dq);
  }
};

// Adds the gradients of one query head and one key block. The first step of the block is `step`. Returns this block's part
// of the slope's gradient.
template <class Pass, class NextStep, class T = typename Pass::T>
T add_head_of_block(Pass& pass, TileFrame f, const Range& seen, int64_t step, const NextStep& step_from,
                    const Turn& turn) {
  constexpr int64_t block_q = backward_tiling<T>().block_q;
  const BackwardParams& p = pass.p;
  const DqRows<T> dq = pass.w.template dq_of<typename Pass::In>(p, f.b, f.h);
  T dslope = 0;
  if (p.dq) turn.begin(step);
  while (step != Turn::kNone) {
    const int64_t next = step_from(step + 1);
    f.i0 = block_in_mirrored_order<T>(p, step) * block_q;
    f.queries = std::min(block_q, seen.end - f.i0);
    pass.recompute(f, [&](const ScoreTile<T>& score) {
      pass.undo_functions(score.frame);
      if (p.dalibi_slopes) dslope += alibi_slope_gradient<T>(p, score.frame, pass.s.dscores);
      pass.add_products(score, dq, turn);
    });
    if (p.dq) turn.finish(step, next);
    step = next;
  }
  return dslope;
}

// Computes dK and dV of one key block in pass.s, summed over the query heads of the task. Each head adds to its dQ.
template <class Pass, class T = typename Pass::T>
void backward_key_block(Pass& pass, const KeyTask& task, int64_t block, int64_t keys) {
  constexpr int64_t block_q = backward_tiling<T>().block_q, block_k = backward_tiling<T>().block_k;
  const BackwardParams& p = pass.p;
  const Sizes& z = p.sizes;
  const int64_t heads = z.heads, j0 = block * block_k;
  std::fill(pass.s.dk, pass.s.dk + keys * round_up_to_lanes<T>(z.head_dim), T(0));
  std::fill(pass.s.dv, pass.s.dv + keys * round_up_to_lanes<T>(z.head_dim_v), T(0));

  const Range seen = visible_queries(p.band, j0, j0 + keys, z.seqlen_q);
  const auto step_from = [&](int64_t step) {  // the next step with a query that sees a key
    for (; step < count_query_steps<T>(p); ++step)
      if (const int64_t i0 = block_in_mirrored_order<T>(p, step) * block_q;
          i0 < seen.end && i0 + block_q > seen.begin)
        return step;
    return Turn::kNone;
  };
  const int64_t first = seen.begin < seen.end ? step_from(0) : Turn::kNone;
  if (first != Turn::kNone) pass.load_keys(task.b, task.h_kv, j0, keys);
  for (int64_t h = task.heads.begin; h < task.heads.end; ++h) {
    const int64_t own = (pass.w.first_block(p, task.b) + block) * heads + h;
    const Turn turn(block == 0 ? nullptr : pass.w.turns + own - heads, pass.w.turns + own);
    const TileFrame f{task.b, h, 0, j0, 0, keys, round_up_to_lanes<T>(keys), false};
    const T dslope = add_head_of_block(pass, f, seen, first, step_from, turn);
    if (p.dalibi_slopes) pass.w.dslopes[own] = dslope;
  }
}

// Stores the rows of one key block in dk or dv; or in the sum `partial` of a part of the query heads, if not null.
template <class In, class T>
void store_key_rows(const Tensor4& grad, DType dtype, T* partial, const T* block, const KeyTask& task,
                    int64_t j0, int64_t keys, int64_t cols) {
  const int64_t ld = round_up_to_lanes<T>(cols);
  if (!grad) return;
  if (partial) {
    std::copy(block, block + keys * ld, partial + j0 * ld);
  } else {
    for_row_type<In>(dtype, [&](auto element) {
      using Row = decltype(element);
      for (int64_t j = 0; j < keys; ++j)
        store_row<Row, T>(grad.row<Row>(task.b, task.h_kv, j0 + j), block + j * ld, cols, T(1));
    });
  }
}

template <class Pass>
void backward_qkv(const typename Pass::Params& call, const typename Pass::Workspace& w,
                  const Parallel& parallel) {
  using In = typename Pass::In;
  using T = typename Pass::T;
  for (int64_t n = 0; call.dq && n < w.key_blocks * call.sizes.heads; ++n)
    new (w.turns + n) Turn::Counter(-1);

  for_each_task(parallel, w.key_tasks.total, [&](int64_t n, int thread) {
    constexpr int64_t block_k = backward_tiling<T>().block_k;
    const TaskList::Task drawn = w.key_tasks.at(n);
    const typename Pass::Params p = of_sequence(call, drawn.b);
    const Sizes& z = p.sizes;
    const KeyTask task = key_task<T>(p, drawn, w.whole_heads);
    if (w.whole_heads)  // otherwise compute_row_terms() clears them
      for (int64_t h = task.heads.begin; h < task.heads.end; ++h)
        clear_rows(w.template dq_of<In>(p, task.b, h), 0, z.seqlen_q, z.head_dim);

    T *dk = w.dk_of(p, task.b, task.h_kv, task.part), *dv = w.dv_of(p, task.b, task.h_kv, task.part);
    Pass pass(call, p, w, thread);
    const ProductUnit<In> unit;
    for (int64_t block = task.blocks.begin; block < task.blocks.end; ++block) {
      const int64_t j0 = block * block_k, keys = std::min(block_k, z.seqlen_k - j0);
      backward_key_block(pass, task, block, keys);
      store_key_rows<In, T>(p.dk, p.dtype, dk, pass.s.dk, task, j0, keys, z.head_dim);
      store_key_rows<In, T>(p.dv, p.dtype, dv, pass.s.dv, task, j0, keys, z.head_dim_v);
    }
  });
}

// Sums `parts` partial rows of `data` for each of these rows of head h of `grad`, in order. Part n begins n *
// part_rows rows after the first, which is overwritten.
template <class In, class T>
void reduce_rows(const Tensor4& grad, DType dtype, T* data, int64_t b, int64_t h, const Range& rows,
                 int64_t cols, int64_t parts, int64_t part_rows) {
  const int64_t ld = round_up_to_lanes<T>(cols);
  for_row_type<In>(dtype, [&](auto element) {
    using Row = decltype(element);
    for (int64_t s = rows.begin; s < rows.end; ++s) {
      T* sum = data + s * ld;
      for (int64_t n = 1; n < parts; ++n) add_rows<T>(sum, sum + n * part_rows * ld, ld);
      store_row<Row, T>(grad.row<Row>(b, h, s), sum, cols, T(1));
    }
  });
}

template <class In, class T>
void reduce_gradients(const BackwardParams& call, const BackwardWorkspace<T>& w, const Parallel& parallel) {
  const int64_t heads = call.sizes.heads;
  if (!w.dq && !w.dk && !w.dv && !call.dalibi_slopes) return;
  for_each_task(parallel, w.reduce_tasks.total, [&](int64_t n, int) {
    const TaskList::Task task = w.reduce_tasks.at(n);
    const BackwardParams p = of_sequence(call, task.b);
    const Sizes& z = p.sizes;
    const auto [b, h, block] = HeadBlocks(z, count_reduced_blocks(p), 1).at(task);
    const int64_t group = heads / z.heads_kv, parts = group_parts<T>(p).parts;
    const auto rows_of = [block = block](int64_t seqlen) {
      return Range{block * kReducedRows, std::min((block + 1) * kReducedRows, seqlen)};
    };
    if (w.dq)
      reduce_rows<In, T>(p.dq, p.dtype, w.template dq_of<In>(p, b, h).data, b, h, rows_of(z.seqlen_q),
                         z.head_dim, 1, 0);
    if (parts > 1 && h % group == 0) {
      const int64_t h_kv = h / group;
      if (p.dk)
        reduce_rows<In, T>(p.dk, p.dtype, w.dk_of(p, b, h_kv, 0), b, h_kv, rows_of(z.seqlen_k), z.head_dim,
                           parts, z.seqlen_k);
      if (p.dv)
        reduce_rows<In, T>(p.dv, p.dtype, w.dv_of(p, b, h_kv, 0), b, h_kv, rows_of(z.seqlen_k), z.head_dim_v,
                           parts, z.seqlen_k);
    }
    if (p.dalibi_slopes && block == 0) {
      const T* dslopes = w.dslopes + w.first_block(p, b) * heads + h;
      T sum = 0;
      for (int64_t k = 0; k < count_key_blocks<T>(p); ++k) sum += dslopes[k * heads];
      static_cast<T*>(p.dalibi_slopes)[b * heads + h] = sum;
    }
  });
}

template <class Pass>
void backward_passes(const typename Pass::Params& p, const typename Pass::Workspace& w,
                     const Parallel& parallel) {
  if (p.wants_qkv_pass()) {
    backward_qkv<Pass>(p, w, parallel);
    reduce_gradients<typename Pass::In, typename Pass::T>(p, w, parallel);
  }
  if (p.dmask) backward_mask<Pass>(p, w, parallel);
  if (p.functions && p.functions->dcaptured) backward_captured<Pass>(p, w, parallel);
}

template <class In, class T>
BackwardWorkspace<T> allocate_backward_pass(Arena& arena, const BackwardParams& p, int threads) {
  Arena scratch(nullptr);
  allocate_backward<In, T>(scratch, p);
  return allocate_backward_workspace<In, T>(arena, p, threads, scratch.used());
}

template <class In, class T>
void backward(const BackwardParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const BackwardWorkspace<T> w = allocate_backward_pass<In, T>(arena, p, parallel.threads);
  compute_row_terms<In, T>(p, w, parallel);
  if (p.dsink)
    sink_gradient(p, w, parallel, [&](const BackwardParams& own, int64_t b, int64_t h, int64_t i) {
      return w.rows.of_head(own, b, h).delta[i];
    });
  backward_passes<BackwardPass<In, T>>(p, w, parallel);
}

template <class In, class T>
size_t backward_workspace(const BackwardParams& p, int threads) {
  Arena arena(nullptr);
  allocate_backward_pass<In, T>(arena, p, threads);
  return arena.used();
}
