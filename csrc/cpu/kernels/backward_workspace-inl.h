// Memory of the backward: what all tasks share, and each thread's scratch. All of it is linear in the rows of
// q and k.
#pragma once

#include "backward_tile-inl.h"

// Enough tasks for a few threads where batch x heads is small; each costs one dQ accumulator.
constexpr int64_t kBackwardTasks = 8;

// Tiles of the mask's gradient. A mask whose rows are those of a packed q has the tiles of each sequence;
// any other has those of its own shape, whatever sequences there are.
struct MaskTiles {
  int64_t batches, heads, row_blocks, col_blocks;

  int64_t count() const { return batches * heads * row_blocks * col_blocks; }
};

template <class T>
MaskTiles mask_tiles(const BackwardParams& p) {
  const auto [block_q, block_k] = backward_tiling<T>();
  const MaskGrad& g = p.dmask;
  const int64_t rows = p.varlen && p.varlen.mask_by_row ? p.sizes.seqlen_q : g.rows;
  return {g.batch, g.heads, ceil_div(rows, block_q), ceil_div(g.cols, block_k)};
}

template <class T>
TaskList plan_mask_tasks(Arena& arena, const BackwardParams& call) {
  if (!call.dmask) return {};
  if (call.varlen && call.varlen.mask_by_row)
    return plan_tasks(arena, call, [](const BackwardParams& p) { return mask_tiles<T>(p).count(); });
  TaskList list;
  list.per_batch = list.total = mask_tiles<T>(call).count();
  return list;
}

// How many tasks share the keys of a head. It follows from the shape alone, and, of a packed sequence, from
// that sequence alone. Where it follows from the batch, fewer sums of dQ need less memory; a deterministic
// call keeps the bits of its gradients whatever else is in the batch.
template <class T>
int64_t backward_chunks(const BackwardParams& p) {
  const Sizes& z = p.sizes;
  const int64_t heads = (p.varlen || p.deterministic ? 1 : z.batch) * z.heads;
  const int64_t key_blocks = std::max<int64_t>(ceil_div(z.seqlen_k, backward_tiling<T>().block_k), 1);
  return std::min(ceil_div(kBackwardTasks, heads), key_blocks);
}

template <class T>
struct BackwardWorkspace {
  TaskList row_tasks, key_tasks, mask_tasks;  // of each pass
  int64_t chunks;                             // of a sequence, at most
  RowTerms<T> rows;                           // [statistics rows] each
  T* dq;          // [B][chunks][H][S_q][D]; here and below, packed: each sequence behind the last one's rows
  T* dk;          // [B][H][S_k][D]     only if query heads share a key head
  T* dv;          // [B][H][S_k][D_v]   likewise
  T* dslopes;     // [B][H][chunks]
  char* scratch;  // of each thread: what a pass keeps begins with a BackwardScratch
  size_t scratch_bytes;

  // The parts of b, whose call is p.
  T* dq_of(const BackwardParams& p, int64_t b) const {
    const int64_t first = p.varlen ? p.varlen.first_q : b * p.sizes.seqlen_q;
    return dq + first * chunks * p.sizes.heads * round_up_to_lanes<T>(p.sizes.head_dim);
  }
  T* dk_of(const BackwardParams& p, int64_t b) const { return key_rows_of(p, b, dk, p.sizes.head_dim); }
  T* dv_of(const BackwardParams& p, int64_t b) const { return key_rows_of(p, b, dv, p.sizes.head_dim_v); }
  T* dslopes_of(const BackwardParams& p, int64_t b) const { return dslopes + b * p.sizes.heads * chunks; }

 private:
  T* key_rows_of(const BackwardParams& p, int64_t b, T* data, int64_t cols) const {
    const int64_t first = p.varlen ? p.varlen.first_k : b * p.sizes.seqlen_k;
    return data + first * p.sizes.heads * round_up_to_lanes<T>(cols);
  }
};

template <class T>
int64_t count_query_blocks(const BackwardParams& p) {
  return ceil_div(p.sizes.seqlen_q, backward_tiling<T>().block_q);
}

template <class T>
BackwardWorkspace<T> plan_backward_workspace(Arena& arena, const BackwardParams& call, int threads,
                                             size_t scratch_bytes) {
  const Sizes& z = call.sizes;
  const int64_t d = round_up_to_lanes<T>(z.head_dim), d_v = round_up_to_lanes<T>(z.head_dim_v);
  const int64_t rows_q = call.varlen ? call.varlen.total_q : z.batch * z.seqlen_q;
  const int64_t rows_k = call.varlen ? call.varlen.total_k : z.batch * z.seqlen_k;
  const bool shared = z.heads != z.heads_kv;

  BackwardWorkspace<T> w;
  w.row_tasks = plan_tasks(arena, call,
                           [](const BackwardParams& p) { return p.sizes.heads * count_query_blocks<T>(p); });
  w.key_tasks =
      plan_tasks(arena, call, [](const BackwardParams& p) { return p.sizes.heads * backward_chunks<T>(p); });
  w.mask_tasks = plan_mask_tasks<T>(arena, call);
  w.chunks = backward_chunks<T>(call);  // the longest sequence has the most
  for (T** term : {&w.rows.delta, &w.rows.reference, &w.rows.correction})
    *term = arena.take<T>(call.statistics_rows());
  w.dq = arena.take<T>(call.dq ? w.chunks * z.heads * rows_q * d : 0);
  w.dk = arena.take<T>(call.dk && shared ? z.heads * rows_k * d : 0);
  w.dv = arena.take<T>(call.dv && shared ? z.heads * rows_k * d_v : 0);
  w.dslopes = arena.take<T>(call.dalibi_slopes ? z.batch * z.heads * w.chunks : 0);
  w.scratch_bytes = scratch_bytes;
  w.scratch = arena.take<char>(static_cast<int64_t>(scratch_bytes) * threads);
  return w;
}

template <class T>
Arena thread_arena(const BackwardWorkspace<T>& w, int thread) {
  return Arena(w.scratch + thread * w.scratch_bytes);
}
