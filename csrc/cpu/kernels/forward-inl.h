// Forward: FlashAttention-2, algorithm 1 (Dao 2023), one task per (sequence, head, query block).
//
//   S^T = K Q^T    m' = max(m, rowmax S)    P = e^(S - m')    l = l e^(m - m') + rowsum P
//   O   = O e^(m - m') + P V                at the end O / l and lse = m + log l
#pragma once

#include "decode-inl.h"
#include "dropout_tile-inl.h"
#include "forward_products-inl.h"
#include "softmax-inl.h"

template <class In, class T>
struct ForwardScratch {
  ForwardProducts<In, T> products;
  T* scores;  // [block_k][block_q]   S^T, then P^T in place
  MaskTile<T> mask;
  T* dropout_tile;  // [block_k][block_q]
  T* out;           // [block_q][D_v]    O, not yet divided by l
  T* row_max;       // [block_q]
  T* row_sum;       // [block_q]
  T* rescale;       // [block_q]
};

template <class In, class T>
ForwardScratch<In, T> allocate_forward(Arena& arena, const AttentionParams& p) {
  const auto [block_q, block_k] = fitted(forward_tiling<T>(), p.sizes);
  ForwardScratch<In, T> s;
  s.products = ForwardProducts<In, T>::allocate(arena, p);
  s.scores = arena.take<T>(block_k * block_q);
  s.mask = allocate_mask_tile<T>(arena, p.mask, block_q, block_k);
  s.mask.functions = allocate_functions<T>(arena, p, block_q, block_k, false);
  s.dropout_tile = p.dropout ? arena.take<T>(block_k * block_q) : nullptr;
  s.out = arena.take<T>(block_q * round_up_to_lanes<T>(p.sizes.head_dim_v));
  s.row_max = arena.take<T>(block_q);
  s.row_sum = arena.take<T>(block_q);
  s.rescale = arena.take<T>(block_q);
  return s;
}

template <class In, class T>
void forward_query_block(const AttentionParams& p, const ForwardScratch<In, T>& s, int64_t b, int64_t h,
                         int64_t i0) {
  const Tiling tiling = forward_tiling<T>();
  const Sizes& z = p.sizes;
  const int64_t d_v = round_up_to_lanes<T>(z.head_dim_v);
  const int64_t queries = std::min(tiling.block_q, z.seqlen_q - i0);
  const int64_t ld = round_up_to_lanes<T>(queries);

  const T unit = score_unit<T>(p), scale = unit == T(1) ? product_scale<T>(p) : T(1);

  s.products.load_queries(p, b, h, i0, queries, ld);
  const RowStart<T> start = start_of_row<T>(p.sink, b, h, unit);
  std::fill(s.row_max, s.row_max + ld, start.max);
  std::fill(s.row_sum, s.row_sum + ld, start.sum);
  std::fill(s.out, s.out + queries * d_v, T(0));

  const Range keys = keys_of_tiles(p, i0, queries);
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += tiling.block_k) {
    const TileFrame f{b, h, i0, j0, queries, std::min(tiling.block_k, keys.end - j0), ld, true};
    const MaskTile<T> mask = with_functions<T>(p, f, load_mask_tile<T>(p, f, s.mask), s.mask.functions);
    if (mask.masked == TileMask::kAll) continue;

    MaskLines ahead(p, f);
    GradualPrefetch gradual(ahead, ahead.count(), f.keys * ld / kLanes<T>);
    s.products.scores(p, f, scale, s.scores, false, gradual.prefetch_hook());
    const ScoreTile<T> score = finish_scores<T>(p, f, mask, s.scores, nullptr);

    online_softmax<T>(f, unit, s.scores, s.row_max, s.row_sum, s.rescale);
    if (p.dropout) {  // after the row sum: dropout applies to the normalised P
      load_dropout_tile<T>(p, f, s.dropout_tile);
      multiply_rows<T>(s.scores, s.dropout_tile, f.keys * ld);
    }

    s.products.add_values(p, score, s.scores, s.rescale, s.out);
  }

  T* lse = static_cast<T*>(p.lse) + p.lse_index(b, h, i0);
  for (int64_t i = 0; i < queries; ++i) {
    finish_row<In, T>(p.out.row<In>(b, h, i0 + i), s.out + i * d_v, z.head_dim_v, s.row_max[i], unit,
                      s.row_sum[i], lse[i]);
  }
}

// Orders the query blocks as tasks: the longest block of a causal head is first. With few tasks the heads are
// interleaved, so that the last tasks are short. Otherwise all blocks of a head follow each other, because its keys
// stay in the cache.
template <class T>
HeadBlocks query_blocks(const Sizes& z, int threads) {
  constexpr int64_t kFewTasks = 32;  // per thread; with more tasks, the last ones matter little
  const int64_t blocks = ceil_div(z.seqlen_q, forward_tiling<T>().block_q), heads = z.batch * z.heads;
  return {z, blocks, heads * blocks < kFewTasks * threads ? heads : 1};
}

// Counts the query blocks of all heads. In the decode kernel: counts splits of the keys.
template <class T>
int64_t count_forward_tasks(const AttentionParams& p, const DecodeGrouping& decode) {
  if (p.sizes.seqlen_q == 0) return 0;  // a packed sequence may be empty
  if (is_decode(p)) return p.sizes.batch * decode.count(p, split_keys_of<T>(p));
  return p.sizes.batch * p.sizes.heads * ceil_div(p.sizes.seqlen_q, forward_tiling<T>().block_q);
}

template <class T>
struct ForwardWorkspace {
  DecodeGrouping decode;  // how the decode kernel groups heads and splits
  TaskList tasks;
  SplitResults<T> splits;
  char* scratch;  // per thread
  size_t scratch_bytes;
};

template <class In, class T>
ForwardWorkspace<T> allocate_forward_workspace(Arena& arena, const AttentionParams& call, int threads) {
  ForwardWorkspace<T> w;
  if (may_decode(call)) w.decode = group_decode<T>(call, threads);
  w.tasks =
      list_tasks(arena, call, [&](const AttentionParams& p) { return count_forward_tasks<T>(p, w.decode); });
  w.splits = allocate_split_results<T>(arena, call);
  Arena blocks(nullptr), decode(nullptr);
  if (call.varlen || !is_decode(call)) allocate_forward<In, T>(blocks, call);
  if (may_decode(call)) allocate_decode_scratch<In, T>(decode, call, w.decode.heads);
  w.scratch_bytes = std::max(blocks.used(), decode.used());
  w.scratch = arena.take<char>(static_cast<int64_t>(w.scratch_bytes) * threads);
  return w;
}

template <class In, class T>
void forward(const AttentionParams& call, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const ForwardWorkspace<T> w = allocate_forward_workspace<In, T>(arena, call, parallel.threads);
  for_each_task(parallel, w.tasks.total, [&](int64_t n, int thread) {
    const TaskList::Task task = w.tasks.at(n);
    const AttentionParams p = of_sequence(call, task.b);
    Arena scratch(w.scratch + thread * w.scratch_bytes);
    const ProductUnit<In> unit;
    if (is_decode(p)) {
      const DecodeSplits key_splits = split_keys_of<T>(p);
      decode_task<In, T>(p, key_splits, allocate_decode_scratch<In, T>(scratch, call, w.decode.heads),
                         w.decode.at(p, key_splits, task), w.splits);
    } else {
      const HeadBlocks list = query_blocks<T>(p.sizes, parallel.threads);
      const auto [b, h, n_from_last] = list.at(task);
      const int64_t block = list.blocks - 1 - n_from_last;
      forward_query_block<In, T>(p, allocate_forward<In, T>(scratch, call), b, h,
                                 block * forward_tiling<T>().block_q);
    }
  });
  if (w.decode.leaves_splits) merge_all_splits<In, T>(call, w.decode, w.splits, parallel);
}

template <class In, class T>
size_t forward_workspace(const AttentionParams& call, int threads) {
  Arena arena(nullptr);
  allocate_forward_workspace<In, T>(arena, call, threads);
  return arena.used();
}
