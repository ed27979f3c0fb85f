// Memory of the backward: arrays shared by all tasks, and scratch for each thread. Its size is linear in the rows of
// q and k.
#pragma once

#include "backward_tile-inl.h"

// Tiles of the mask's gradient. If the rows of the mask are the rows of a packed q, each sequence has its own tiles.
// Otherwise the tiles cover the mask's own shape.
struct MaskTiles {
  int64_t batches, heads, row_blocks, col_blocks;
  int64_t rows;   // rows per tile, if the mask has rows
  int64_t parts;  // number of partial sums per mask tile

  int64_t count() const { return batches * heads * row_blocks * col_blocks; }
};

// Depends on the shape alone. Makes several parts if the mask has few tiles. Each part has a minimum number of score
// tiles, and all parts together need at most the memory of q and k.
template <class T>
int64_t count_mask_parts(const BackwardParams& p, const MaskTiles& tiles) {
  constexpr int64_t kTasks = 256, kScoreTiles = 8;
  const auto [block_q, block_k] = backward_tiling<T>();
  const Sizes& z = p.sizes;
  const MaskGrad& g = p.dmask;
  if (p.varlen || tiles.count() == 0) return 1;
  const int64_t of_batch =
      tiles.count() / g.batch;  // other sequences in the batch must not change the bits of a result
  const int64_t shared_heads = z.batch / g.batch * (z.heads / g.heads);
  const int64_t score_tiles = shared_heads * (g.rows == 1 ? ceil_div(z.seqlen_q, block_q) : 1) *
                              (g.cols == 1 ? ceil_div(z.seqlen_k, block_k) : 1);
  const int64_t inputs = z.batch / g.batch * z.heads * (z.seqlen_q + z.seqlen_k) * z.head_dim;
  return std::max<int64_t>(
      std::min({kTasks / of_batch, score_tiles / kScoreTiles, inputs / (of_batch * tiles.rows * block_k)}),
      1);
}

template <class T>
MaskTiles mask_tiles(const BackwardParams& p) {
  const auto [block_q, block_k] = backward_tiling<T>();
  const MaskGrad& g = p.dmask;
  const int64_t rows = p.varlen && p.varlen.mask_by_row ? p.sizes.seqlen_q : g.rows;
  MaskTiles tiles{
      g.batch, g.heads, ceil_div(rows, block_q), ceil_div(g.cols, block_k), std::min(block_q, rows), 1};
  tiles.parts = count_mask_parts<T>(p, tiles);
  return tiles;
}

template <class T>
TaskList allocate_mask_tasks(Arena& arena, const BackwardParams& call) {
  if (!call.dmask) return {};
  if (call.varlen && call.varlen.mask_by_row)
    return list_tasks(arena, call, [](const BackwardParams& p) { return mask_tiles<T>(p).count(); });
  TaskList list;
  const MaskTiles tiles = mask_tiles<T>(call);
  list.total = tiles.count() * tiles.parts;
  return list;
}

// Number of key blocks in one sequence, at least one, because a sequence without keys must clear dQ.
template <class T>
int64_t count_key_blocks(const BackwardParams& p) {
  return std::max<int64_t>(ceil_div(p.sizes.seqlen_k, backward_tiling<T>().block_k), 1);
}

// The query heads that share a key head, cut into parts. A part adds up dK and dV of all its heads, so dK and dV are not
// written and read once for each head.
struct GroupParts {
  int64_t heads;  // query heads of a part; the last part may have fewer
  int64_t parts;  // of a key head

  int64_t count(const Sizes& z) const { return z.heads_kv * parts; }
};

// Cuts a group only if its sequence has too few tasks for many threads. Depends on the shape of one sequence alone, because
// the parts decide the order of the sums.
template <class T>
GroupParts group_parts(const BackwardParams& p) {
  constexpr int64_t kTasks = 128;
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / std::max<int64_t>(z.heads_kv, 1);
  if (group <= 1) return {1, 1};
  const int64_t most = std::min(group, ceil_div(kTasks, z.heads_kv * count_key_blocks<T>(p)));
  const int64_t heads = ceil_div(group, most);
  return {heads, ceil_div(group, heads)};
}

// Returns whether a task processes all keys of its heads. This needs four tasks per thread, and enough tasks that threads
// wait at most a tenth of the time for the last ones. Otherwise a task processes one block of keys. The order of
// summation is the same in both cases, so the bits are equal.
template <class T>
bool takes_whole_heads(const BackwardParams& p, int threads) {
  const int64_t tasks = (p.varlen ? 1 : p.sizes.batch) * group_parts<T>(p).count(p.sizes);
  return tasks >= 4 * threads && 10 * tasks >= 9 * ceil_div(tasks, threads) * threads;
}

// A task of one sequence. Threads draw the tasks block by block, and within a block head by head. So a key block rarely
// waits for the block before it.
struct KeyTask {
  int64_t b, h_kv, part;
  Range heads;  // query heads
  Range blocks;
};
template <class T>
KeyTask key_task(const BackwardParams& p, const TaskList::Task& task, bool whole_heads) {
  const Sizes& z = p.sizes;
  const GroupParts group = group_parts<T>(p);
  const int64_t blocks = count_key_blocks<T>(p), parts = group.count(z), of_key_head = z.heads / z.heads_kv;
  const auto [b, n, block] = HeadBlocks(z.batch, parts, whole_heads ? 1 : blocks, z.batch * parts).at(task);
  const int64_t h_kv = n / group.parts, part = n % group.parts, first = part * group.heads;
  return {b,
          h_kv,
          part,
          {h_kv * of_key_head + first, h_kv * of_key_head + std::min(first + group.heads, of_key_head)},
          {block, whole_heads ? blocks : block + 1}};
}

// Rows of gradients that one task of reduce_gradients() sums.
constexpr int64_t kReducedRows = 256;
inline int64_t count_reduced_blocks(const BackwardParams& p) {
  return ceil_div(std::max<int64_t>({p.sizes.seqlen_q, p.sizes.seqlen_k, 1}), kReducedRows);
}

template <class T>
int64_t count_query_blocks(const BackwardParams& p) {
  return ceil_div(p.sizes.seqlen_q, backward_tiling<T>().block_q);
}

// The order in which each key block visits the query blocks: spans of a few blocks, the last span first. Key blocks
// of a causal or windowed head then begin with rows that no earlier block sees, and do not wait for each other.
// Within a span the order is ascending, because the hardware prefetches that way: purely descending order takes 6 to
// 10% longer at S 4096.
constexpr int64_t kBlocksAtATime = 4;

template <class T>
int64_t count_query_steps(const BackwardParams& p) {
  return ceil_div(count_query_blocks<T>(p), kBlocksAtATime) * kBlocksAtATime;
}
// Maps step n to its query block. The map is its own inverse. A block beyond the last block has no queries.
template <class T>
int64_t block_in_mirrored_order(const BackwardParams& p, int64_t n) {
  const int64_t within = n % kBlocksAtATime, first = n - within;
  return count_query_steps<T>(p) - kBlocksAtATime - first + within;
}
template <class T>
int64_t step_of_tile(const BackwardParams& p, const TileFrame& f) {
  return block_in_mirrored_order<T>(p, f.i0 / backward_tiling<T>().block_q);
}

// The number of parts of backward_captured(), each with separate sums. The number of tasks alone decides. All parts
// together have at most 2^22 sums, unless there is only one part.
inline int64_t count_captured_parts(const BackwardParams& p, int64_t tasks) {
  constexpr int64_t kParts = 32, kSums = int64_t{1} << 22;
  return std::max<int64_t>(
      std::min({kParts, tasks, kSums / std::max<int64_t>(p.functions->captured_count, 1)}), 1);
}

template <class T>
struct BackwardWorkspace {
  TaskList row_tasks, key_tasks, reduce_tasks, mask_tasks;  // the tasks of each loop
  TaskList captured_tasks;                                  // one key block of one head each
  int64_t captured_parts = 0;
  bool whole_heads;  // whether a key task processes all keys of its heads
  RowTerms<T> rows;  // [rows of lse] each
  T* dq;             // [B][H][S_q][D]    null: dq itself receives the sums. In packed calls, here and below,
                     //                    the rows of each sequence follow the previous sequence's rows
  T* dk;     // [B][H_kv][parts][S_k][D]    only if a key head has several parts (GroupParts). A packed call
             //                             has room for H rows of each key
  T* dv;     // [B][H_kv][parts][S_k][D_v]  likewise
  T* dmask;  // [mask's tiles][parts][rows][block_k]  only if there are several parts
  double* dcaptured;     // [captured_parts][captured elements]
  T* dslopes;            // [B][key blocks][H]
  Turn::Counter* turns;  // [B][key blocks][H]  the next step of dQ that this key block adds to
  int64_t key_blocks;    // key blocks of all sequences
  KeptMasks* kept;       // per thread
  char* scratch;         // per thread: starts with a BackwardScratch
  size_t scratch_bytes;

  // Returns the index of sequence b's first key block. `p` is the call of sequence b.
  int64_t first_block(const BackwardParams& p, int64_t b) const {
    return p.varlen ? p.varlen.first_k / backward_tiling<T>().block_k + b : b * count_key_blocks<T>(p);
  }

  // Pointers to the arrays of sequence b. `p` is the call of sequence b.
  template <class In>
  DqRows<T> dq_of(const BackwardParams& p, int64_t b, int64_t h) const {
    if (!p.dq) return {nullptr, 0};
    if constexpr (std::is_same_v<In, T>)
      if (!dq) return {p.dq.row<T>(b, h, 0), p.dq.stride_s};
    const int64_t ld = round_up_to_lanes<T>(p.sizes.head_dim);
    const int64_t first = p.varlen ? p.varlen.first_q : b * p.sizes.seqlen_q;
    return {dq + (first * p.sizes.heads + h * p.sizes.seqlen_q) * ld, ld};
  }
  // The sums of one part of key head h_kv. Null: the part's sums are the gradients.
  T* dk_of(const BackwardParams& p, int64_t b, int64_t h_kv, int64_t part) const {
    return key_rows_of(p, b, h_kv, part, dk, p.sizes.head_dim);
  }
  T* dv_of(const BackwardParams& p, int64_t b, int64_t h_kv, int64_t part) const {
    return key_rows_of(p, b, h_kv, part, dv, p.sizes.head_dim_v);
  }

 private:
  T* key_rows_of(const BackwardParams& p, int64_t b, int64_t h_kv, int64_t part, T* data,
                 int64_t cols) const {
    const Sizes& z = p.sizes;
    const GroupParts group = group_parts<T>(p);
    if (!data || group.parts == 1) return nullptr;
    const int64_t first = p.varlen ? p.varlen.first_k * z.heads : b * group.count(z) * z.seqlen_k;
    return data + (first + (h_kv * group.parts + part) * z.seqlen_k) * round_up_to_lanes<T>(cols);
  }
};

// Returns whether the rows of dq can hold the sums: same type, and whole vectors.
template <class In, class T>
bool adds_to_dq_itself(const BackwardParams& p) {
  return !converts_rows<In, T>(p.dtype) && p.sizes.head_dim % kLanes<T> == 0;
}

template <class In, class T>
BackwardWorkspace<T> allocate_backward_workspace(Arena& arena, const BackwardParams& call, int threads,
                                                 size_t scratch_bytes) {
  const Sizes& z = call.sizes;
  const int64_t d = round_up_to_lanes<T>(z.head_dim), d_v = round_up_to_lanes<T>(z.head_dim_v);
  const int64_t rows_q = call.varlen ? call.varlen.total_q : z.batch * z.seqlen_q;
  const int64_t rows_k = call.varlen ? call.varlen.total_k : z.batch * z.seqlen_k;
  const GroupParts group = group_parts<T>(call);
  const int64_t partial_sums =  // rows of dk and dv in the workspace, for each key
      call.varlen ? (z.heads == z.heads_kv ? 0 : z.heads) : (group.parts == 1 ? 0 : group.count(z));

  BackwardWorkspace<T> w;
  w.whole_heads = takes_whole_heads<T>(call, threads);
  w.row_tasks = list_tasks(arena, call, [](const BackwardParams& p) {
    return p.sizes.batch * p.sizes.heads * count_query_blocks<T>(p);
  });
  w.key_tasks = list_tasks(arena, call, [&](const BackwardParams& p) {
    return p.sizes.batch * group_parts<T>(p).count(p.sizes) * (w.whole_heads ? 1 : count_key_blocks<T>(p));
  });
  w.reduce_tasks = list_tasks(arena, call, [](const BackwardParams& p) {
    return p.sizes.batch * p.sizes.heads * count_reduced_blocks(p);
  });
  w.mask_tasks = allocate_mask_tasks<T>(arena, call);
  for (T** term : {&w.rows.delta, &w.rows.reference, &w.rows.correction})
    *term = arena.take<T>(call.lse_size());
  w.dq = call.dq && !adds_to_dq_itself<In, T>(call) ? arena.take<T>(z.heads * rows_q * d) : nullptr;
  w.dk = call.dk && partial_sums > 0 ? arena.take<T>(partial_sums * rows_k * d) : nullptr;
  w.dv = call.dv && partial_sums > 0 ? arena.take<T>(partial_sums * rows_k * d_v) : nullptr;
  w.dmask = nullptr;
  if (const MaskTiles tiles = call.dmask ? mask_tiles<T>(call) : MaskTiles{}; tiles.parts > 1)
    w.dmask = arena.take<T>(w.mask_tasks.total * tiles.rows * backward_tiling<T>().block_k);
  w.dcaptured = nullptr;
  if (call.functions && call.functions->dcaptured) {
    int64_t most = 0;  // tasks. Without memory, a packed call's list has no total
    const auto count = [&](const BackwardParams& p) {
      return p.sizes.batch * p.sizes.heads * count_key_blocks<T>(p);
    };
    w.captured_tasks = list_tasks(arena, call, count);
    for (int64_t b = 0; b < (call.varlen ? z.batch : 1); ++b) most += count(of_sequence(call, b));
    w.captured_parts = count_captured_parts(call, most);
    w.dcaptured = arena.take<double>(w.captured_parts * call.functions->captured_count);
  }
  // Packed: an upper bound, because each sequence begins a new block.
  w.key_blocks = call.varlen ? call.varlen.total_k / backward_tiling<T>().block_k + z.batch
                             : z.batch * count_key_blocks<T>(call);
  w.dslopes = arena.take<T>(call.dalibi_slopes ? w.key_blocks * z.heads : 0);
  w.turns = arena.take<Turn::Counter>(call.dq ? w.key_blocks * z.heads : 0);
  const int64_t block_q = fitted(backward_tiling<T>(), z).block_q;
  w.kept = KeptMasks::allocate_for_threads<T>(arena, call, threads, block_q, block_q);
  w.scratch_bytes = scratch_bytes;
  w.scratch = arena.take<char>(static_cast<int64_t>(scratch_bytes) * threads);
  return w;
}

template <class T>
Arena thread_arena(const BackwardWorkspace<T>& w, int thread) {
  return Arena(w.scratch + thread * w.scratch_bytes);
}
