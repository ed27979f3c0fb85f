// Forward: FlashAttention-2, algorithm 1 (Dao 2023), one task per (sequence, head, query block).
//
//   S^T = K Q^T    m' = max(m, rowmax S)    P = e^(S - m')    l = l e^(m - m') + rowsum P
//   O   = O e^(m - m') + P V                at the end O / l and lse = m + log l
#pragma once

#include "decode-inl.h"
#include "dropout_tile-inl.h"
#include "forward_products-inl.h"
#include "row_tiles-inl.h"
#include "softmax-inl.h"
#include "tile_lines-inl.h"

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

// Scratch for `blocks` blocks of queries. jvp-inl.h has one block.
template <class In, class T>
ForwardScratch<In, T> allocate_forward(Arena& arena, const AttentionParams& p, int64_t blocks = 1) {
  const auto [block_q, block_k] = fitted_forward_tiling<T>(p.sizes);
  ForwardScratch<In, T> s;
  s.products = ForwardProducts<In, T>::allocate(arena, p, blocks);
  s.scores = arena.take<T>(block_k * block_q);
  s.mask = allocate_mask_tile<T>(arena, p.mask, block_q, block_k);
  s.mask.functions = allocate_functions<T>(arena, p, block_q, block_k, false);
  s.dropout_tile = p.dropout ? arena.take<T>(block_k * block_q) : nullptr;
  s.out = arena.take<T>(blocks * block_q * round_up_to_lanes<T>(p.sizes.head_dim_v));
  s.row_max = arena.take<T>(blocks * block_q);
  s.row_sum = arena.take<T>(blocks * block_q);
  s.rescale = arena.take<T>(block_q);
  return s;
}

inline int64_t bytes_of_head(const AttentionParams& p) {
  return p.sizes.seqlen_k * (p.sizes.head_dim + p.sizes.head_dim_v) * bytes_of(p.dtype);
}
// A head of so many bytes does not stay in L2 from one query block to the next.
constexpr int64_t kL2Bytes = 2 << 20;

// Two blocks of queries share tiles of K and V if the tiles are converted or come from pages, or if a head's keys and values do not
// fit into L2, so that a task converts or reads each tile once. 49 to 128 queries of few heads take 0.87 to 0.95 of the time (AVX2,
// Zen 3).
constexpr int64_t kMostBlocksPerTask = 2;
template <class In, class T>
int64_t blocks_per_task(const AttentionParams& p, int threads) {
  const Sizes& z = p.sizes;
  constexpr int64_t kEnoughTasks =
      8;  // per thread; with fewer tasks, the last ones keep other threads waiting
  constexpr int64_t kQueries = forward_tiling<T>().block_q;
  const int64_t heads = z.batch * z.heads,
                tasks = heads * ceil_div(z.seqlen_q, kMostBlocksPerTask * kQueries);
  // The same tasks of all heads follow each other. If each thread has as many heads, no thread waits.
  const bool has_equal_heads = (!p.varlen || z.batch == 1) && z.seqlen_q > kQueries && heads % threads == 0;
  const bool shares = converts_rows<In, T>(p.dtype) || copies_rows(p) || bytes_of_head(p) >= kL2Bytes;
  return shares && (has_equal_heads || tasks >= kEnoughTasks * threads) ? kMostBlocksPerTask : 1;
}

// Whether the products of a tile prefetch the next tile of K and V: if a head does not stay in L2, or if few blocks read the heads
// and a cache probably does not hold all of them. With 48 to 1024 queries of heads of 1 to 8 MiB, float32 takes 0.80 to 0.95 of
// the time, and 16 bits 0.85 to 1.0 (AVX2, Zen 3). 16 heads of 256 KiB would take 1.05, and 22 blocks of a head of 1 MiB 1.03.
// Not measured on other instruction sets.
template <class T>
bool prefetches_tiles(const AttentionParams& p) {
  constexpr int64_t kFewBlocks = 4, kBytesInCache = 4 << 20;
  const Sizes& z = p.sizes;
  const int64_t blocks = ceil_div(z.seqlen_q, forward_tiling<T>().block_q) * (z.heads / z.heads_kv);
  const bool is_in_cache = z.batch * z.heads_kv * bytes_of_head(p) <= kBytesInCache;
  return FA_VECTOR_BYTES == 32 && (bytes_of_head(p) >= kL2Bytes || (blocks <= kFewBlocks && !is_in_cache));
}

// Keys of a tile. With a mask or a function, hidden tiles are skipped, so smaller tiles skip more keys.
template <class T>
int64_t forward_keys(const AttentionParams& p) {
  return p.mask || p.functions ? forward_tiling<T>().block_k : kMostForwardKeys<T>;
}

// One block of queries of a head: m, l and O during the loop over the tiles of its keys.
template <class In, class T>
struct QueryBlock {
  const AttentionParams& p;
  int64_t b, h, i0, queries;
  T unit;
  ForwardScratch<In, T>
      s;  // out, row_max, row_sum and the queries belong to this block, the other arrays to the task
  int64_t ld = round_up_to_lanes<T>(queries), d_v = round_up_to_lanes<T>(p.sizes.head_dim_v);
  Range keys = keys_of_tiles(p, i0, queries);

  void start() const {
    s.products.load_queries(p, b, h, i0, queries, ld);
    const RowStart<T> first = start_of_row<T>(p.sink, b, h, unit);
    std::fill(s.row_max, s.row_max + ld, first.max);
    std::fill(s.row_sum, s.row_sum + ld, first.sum);
    std::fill(s.out, s.out + queries * d_v, T(0));
  }

  // Returns the start of the first tile from j0 on that the block mask does not hide.
  int64_t next_tile(int64_t j0) const {
    if (!p.functions || !p.functions->blocks) return j0;
    const int64_t block_k = forward_keys<T>(p);
    return j0 + (first_key_of_blocks(p, b, h, i0, queries, j0) - j0) / block_k * block_k;
  }

  // Adds the keys of the tile from j0 on. `tiles`: the tiles of these keys, if another block has loaded them. `next`: the tile to
  // prefetch, or null.
  void attend(int64_t j0, typename ForwardProducts<In, T>::Loaded& tiles, const TileSources* next) const {
    const T scale = unit == T(1) ? product_scale<T>(p) : T(1);
    const TileFrame whole{b, h, i0, j0, queries, std::min(forward_keys<T>(p), keys.end - j0), ld, true};
    MaskTile<T> mask = with_functions<T>(p, whole, load_mask_tile<T>(p, whole, s.mask), s.mask.functions);
    if (mask.masked == TileMask::kAll) return;
    const TileFrame f = cut_keys<T>(whole, mask);

    MaskLines mask_lines(p, f);
    TileLines tile_lines(next, p.sizes.kv_head(h));
    const int64_t vectors_of_scores = f.keys * ld / kLanes<T>, vectors_of_out = f.queries * d_v / kLanes<T>;
    const bool has_mask_lines = mask_lines.count() > 0;
    GradualPrefetch of_mask(mask_lines, mask_lines.count(), vectors_of_scores);
    GradualPrefetch of_tile(tile_lines, tile_lines.count(),
                            (has_mask_lines ? 0 : vectors_of_scores) + vectors_of_out);
    const KeyStairs stairs(p, f);
    s.products.scores(p, f, stairs, scale, s.scores, false,
                      has_mask_lines ? of_mask.prefetch_hook() : of_tile.prefetch_hook(), &tiles);
    const ScoreTile<T> score = finish_scores<T>(p, f, mask, s.scores, nullptr);

    const bool packed = s.products.packs_probs(p);
    s.products.softmax(f, stairs, unit, s.scores, s.row_max, s.row_sum, s.rescale, packed);
    if (p.dropout) {  // after the row sum: dropout applies to the normalised P
      load_dropout_tile<T>(p, f, s.dropout_tile);
      multiply_rows<T>(s.scores, s.dropout_tile, f.keys * ld);
    }

    s.products.add_values(p, score, stairs, s.scores, s.rescale, s.out, packed, &tiles,
                          of_tile.prefetch_hook());
  }

  void finish() const {
    T* lse = static_cast<T*>(p.lse) + p.lse_index(b, h, i0);
    for_row_type<In>(p.dtype, [&](auto element) {
      using Row = decltype(element);
      for (int64_t i = 0; i < queries; ++i)
        finish_row<Row, T>(p.out.row<Row>(b, h, i0 + i), s.out + i * d_v, p.sizes.head_dim_v, s.row_max[i],
                           unit, s.row_sum[i], lse[i]);
    });
  }
};

template <class In, class T>
QueryBlock<In, T> query_block(const AttentionParams& p, ForwardScratch<In, T> s, int64_t b, int64_t h,
                              const Range& rows, int64_t n) {
  const int64_t block_q = fitted_forward_tiling<T>(p.sizes).block_q;
  s.products = s.products.of_block(p, n);
  s.out += n * block_q * round_up_to_lanes<T>(p.sizes.head_dim_v);
  s.row_max += n * block_q;
  s.row_sum += n * block_q;
  return {p, b, h, rows.begin, rows.end - rows.begin, score_unit<T>(p), s};
}

// The blocks [first, first + count) of a head's queries. Blocks with the same first key share the tiles of K
// and V, and the first of them prefetches the next tile. A block's tiles do not depend on the other blocks.
template <class In, class T>
void forward_query_blocks(const AttentionParams& p, const ForwardScratch<In, T>& s, int64_t b, int64_t h,
                          int64_t first, int64_t count, bool prefetches) {
  const int64_t block_k = forward_keys<T>(p);
  const RowTiles rows = row_tiles<T>(p);
  const auto run = [&](const auto&... blocks) {
    (blocks.start(), ...);
    const int64_t begin = std::min({blocks.keys.begin...}), end = std::max({blocks.keys.end...});
    const auto tile_from = [&](int64_t j0) { return std::min({blocks.next_tile(j0)...}); };
    for (int64_t j0 = tile_from(begin), next; j0 < end; j0 = next) {
      next = tile_from(j0 + block_k);
      TileSources following;
      const TileSources* ahead = nullptr;
      if (prefetches && next < end) {
        const int64_t keys = std::min(block_k, end - next);
        following = for_row_type<In>(
            p.dtype, [&](auto element) { return tile_sources<decltype(element)>(p, b, next, keys); });
        ahead = &following;
      }
      typename ForwardProducts<In, T>::Loaded tiles;
      const auto attend = [&](const QueryBlock<In, T>& block) {
        if (j0 >= block.keys.end) return;
        block.attend(j0, tiles, ahead);
        ahead = nullptr;
      };
      (attend(blocks), ...);
    }
    (blocks.finish(), ...);
  };
  const QueryBlock<In, T> block = query_block(p, s, b, h, rows.at(first), 0);
  if (count == 1) return run(block);
  const QueryBlock<In, T> next = query_block(p, s, b, h, rows.at(first + 1), 1);
  if (block.keys.begin == next.keys.begin) return run(block, next);
  run(block);
  run(next);
}

// Orders the query blocks as tasks: the longest block of a causal head is first. With few tasks the heads are
// interleaved, so that the last tasks are short. Otherwise all blocks of a head follow each other, because its keys
// stay in the cache.
inline HeadBlocks query_blocks(const Sizes& z, int64_t tasks_of_head, int threads) {
  constexpr int64_t kFewTasks = 32;  // per thread; with more tasks, the last ones matter little
  const int64_t heads = z.batch * z.heads;
  return {z, tasks_of_head, heads * tasks_of_head < kFewTasks * threads ? heads : 1};
}

// Counts the tasks. A task is `per_task` query blocks of a head; in the decode kernel, splits of the keys.
template <class T>
int64_t count_forward_tasks(const AttentionParams& p, const DecodeGrouping& decode, int64_t per_task) {
  if (p.sizes.seqlen_q == 0) return 0;  // a packed sequence may be empty
  if (is_decode(p)) return p.sizes.batch * decode.count(p, split_keys_of(p));
  return p.sizes.batch * p.sizes.heads * ceil_div(row_tiles<T>(p).count(), per_task);
}

template <class T>
struct ForwardWorkspace {
  DecodeGrouping decode;  // how the decode kernel groups heads and splits
  int64_t per_task;       // query blocks of a task, otherwise
  TaskList tasks;
  SplitResults<T> splits;
  KeptMasks* kept;  // per thread
  char* scratch;    // per thread
  size_t scratch_bytes;
};

template <class In, class T>
ForwardWorkspace<T> allocate_forward_workspace(Arena& arena, const AttentionParams& call, int threads) {
  ForwardWorkspace<T> w;
  if (may_decode(call)) w.decode = group_decode<T>(call, threads);
  w.per_task = blocks_per_task<In, T>(call, threads);
  w.tasks = list_tasks(
      arena, call, [&](const AttentionParams& p) { return count_forward_tasks<T>(p, w.decode, w.per_task); });
  w.splits = allocate_split_results<T>(arena, call);
  constexpr int64_t kLeastQueries = 32;  // of the tiles of a block of 128 queries
  w.kept = KeptMasks::allocate_for_threads<T>(arena, call, threads,
                                              fitted_forward_tiling<T>(call.sizes).block_q, kLeastQueries);
  Arena blocks(nullptr), decode(nullptr);
  if (call.varlen || !is_decode(call)) allocate_forward<In, T>(blocks, call, w.per_task);
  if (may_decode(call))
    for_row_type<In>(call.dtype, [&](auto element) {
      allocate_decode_scratch<decltype(element), T>(decode, call, w.decode.heads, threads);
    });
  w.scratch_bytes = std::max(blocks.used(), decode.used());
  w.scratch = arena.take<char>(static_cast<int64_t>(w.scratch_bytes) * threads);
  return w;
}

template <class In, class T>
void forward(const AttentionParams& call, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const ForwardWorkspace<T> w = allocate_forward_workspace<In, T>(arena, call, parallel.threads);
  const bool prefetches = prefetches_tiles<T>(call);
  const auto run_task = [&](int64_t n, int thread) {
    const TaskList::Task task = w.tasks.at(n);
    const AttentionParams p = of_sequence(call, task.b);
    Arena scratch(w.scratch + thread * w.scratch_bytes);
    const ProductUnit<In> unit;
    if (is_decode(p)) {
      const DecodeSplits key_splits = split_keys_of(p);
      // Decode reads rows inside of its products, so it is compiled for each type of a row.
      for_row_type<In>(p.dtype, [&](auto element) {
        using Row = decltype(element);
        decode_task<Row, T>(p, key_splits,
                            allocate_decode_scratch<Row, T>(scratch, call, w.decode.heads, parallel.threads),
                            w.decode.at(p, key_splits, task), w.splits);
      });
    } else {
      const int64_t blocks = row_tiles<T>(p).count();
      const HeadBlocks list = query_blocks(p.sizes, ceil_div(blocks, w.per_task), parallel.threads);
      const auto [b, h, n_from_last] = list.at(task);
      const int64_t first = (list.blocks - 1 - n_from_last) * w.per_task;
      ForwardScratch<In, T> own = allocate_forward<In, T>(scratch, call, w.per_task);
      if (w.kept[thread]) own.mask.functions.kept = &w.kept[thread];
      forward_query_blocks<In, T>(p, own, b, h, first, std::min(w.per_task, blocks - first), prefetches);
    }
  };
  if (is_decode(call) && w.tasks.has_equal_sequences())
    for_each_equal_task(parallel, w.tasks.total, run_task);
  else
    for_each_task(parallel, w.tasks.total, run_task);
  if (w.decode.leaves_splits) merge_all_splits<In, T>(call, w.decode, w.splits, parallel);
}

template <class In, class T>
size_t forward_workspace(const AttentionParams& call, int threads) {
  Arena arena(nullptr);
  allocate_forward_workspace<In, T>(arena, call, threads);
  return arena.used();
}
