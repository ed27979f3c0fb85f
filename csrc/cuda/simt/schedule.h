// Cuts a call into blocks. Only the shape decides, so results do not depend on the machine.
#pragma once

#include "../../core/arena.h"
#include "../../core/params.h"
#include "../../core/splits.h"

namespace flash_attn_ext::cuda::simt {

constexpr int kSide = 16;  // a block is a square of 16 x 16 threads
// The launch bounds allow one block of this size on a multiprocessor. With two, a thread would have half the registers,
// and spill.
constexpr int kThreads = kSide * kSide;
constexpr int kBlockK = 64;                        // keys of a tile
constexpr int kRows = 4, kDecodeRows = 1;          // query rows of a thread
constexpr int kBlockQ = kSide * kRows;             // query rows of a tile
constexpr int kNarrowSlice = 64, kMaxSlice = 128;  // columns of a result that a block computes

constexpr int slice_of(int64_t columns) { return columns <= kNarrowSlice ? kNarrowSlice : kMaxSlice; }

struct ForwardSchedule {
  // Few queries: the heads that share a key head fill tiles of 16 rows together. So K and V are read once for all of
  // these heads.
  bool decode;
  int64_t heads_per_tile;
  int64_t row_blocks;  // per batch and tile of heads
  int64_t tasks;       // row blocks of all batches and heads
  int64_t slices;      // of the D_v columns
  int64_t splits;      // of the keys; combine.cu merges them
  int64_t tiles_per_split;
};

inline ForwardSchedule schedule_forward(const AttentionParams& p) {
  constexpr int64_t kWantedBlocks = 256;      // about two for each multiprocessor of a large GPU
  constexpr int64_t kLeastTilesPerSplit = 4;  // with fewer tiles, merging takes longer than splitting saves
  const Sizes& z = p.sizes;
  ForwardSchedule schedule;
  schedule.decode = z.seqlen_q <= kSide;
  schedule.heads_per_tile = schedule.decode && z.heads_kv > 0 ? z.heads / z.heads_kv : 1;
  schedule.row_blocks =
      ceil_div(z.seqlen_q * schedule.heads_per_tile, kSide * (schedule.decode ? kDecodeRows : kRows));
  schedule.tasks =
      schedule.heads_per_tile == 0 ? 0 : z.batch * (z.heads / schedule.heads_per_tile) * schedule.row_blocks;
  schedule.slices = ceil_div(z.head_dim_v, slice_of(z.head_dim_v));

  const int64_t tiles = ceil_div(z.seqlen_k, kBlockK), blocks = schedule.tasks * schedule.slices;
  const int64_t wanted = blocks > 0 ? ceil_div(kWantedBlocks, blocks) : 1, most = tiles / kLeastTilesPerSplit;
  const KeySplits cut = split_keys(p, tiles, wanted < most ? wanted : most);
  schedule.splits = cut.splits;
  schedule.tiles_per_split = cut.tiles_per_split;
  return schedule;
}

// The terms of each query row for the backward kernels, in arrays that are indexed like lse:
//
//   P = e^((S - reference) - correction)    dS = P o (dP - delta)
//
// The reference is lse and the correction 0. If lse is too large to be exact, they are the row's maximum m and log l. A
// row with all keys hidden has the reference +inf: P is 0 without Inf - Inf.
template <class T>
struct RowTerms {
  T *delta, *reference, *correction;

  static RowTerms lay_out(Arena& arena, const AttentionParams& p) {
    const int64_t rows = p.lse_size();
    return {arena.take<T>(rows), arena.take<T>(rows), arena.take<T>(rows)};
  }
};

// The gradient of the mask. A tile of the mask's elements is the sum of all score tiles that share it. If a broadcast
// mask has few tiles, the sum is cut into parts, which dmask_sum_kernel adds in order.
struct MaskSchedule {
  bool by_row;                     // the mask's rows are the rows of a packed q
  int64_t row_blocks, col_blocks;  // tiles of the mask's rows and columns; by row, of a sequence
  int64_t tasks;                   // tiles of all its batches, or all sequences, and heads
  int64_t batches, heads, query_blocks,
      key_blocks;  // the numbers that share a tile: 1 if the mask has this dimension
  int64_t parts, tiles_per_part;
};

// `block_q`: the query rows of a tile.
FA_HOST_DEVICE inline MaskSchedule schedule_mask(const BackwardParams& p, int64_t block_q) {
  constexpr int64_t kWantedBlocks = 256, kLeastTilesPerPart = 4;  // as for the forward's splits
  const Sizes& z = p.sizes;
  const MaskGrad& g = p.dmask;
  MaskSchedule schedule;
  schedule.by_row = p.varlen && p.varlen.mask_by_row;
  schedule.row_blocks = ceil_div(schedule.by_row ? z.seqlen_q : g.rows, block_q);
  schedule.col_blocks = ceil_div(g.cols, kBlockK);
  schedule.tasks =
      (schedule.by_row ? z.batch : g.batch) * g.heads * schedule.row_blocks * schedule.col_blocks;
  schedule.batches = g.batch == 1 && !schedule.by_row ? z.batch : 1;
  schedule.heads = g.heads == 1 ? z.heads : 1;
  schedule.query_blocks = g.rows == 1 && !schedule.by_row ? ceil_div(z.seqlen_q, block_q) : 1;
  schedule.key_blocks = g.cols == 1 ? ceil_div(z.seqlen_k, kBlockK) : 1;

  const int64_t tiles = schedule.batches * schedule.heads * schedule.query_blocks * schedule.key_blocks;
  const int64_t wanted = schedule.tasks > 0 ? ceil_div(kWantedBlocks, schedule.tasks) : 1;
  const int64_t most = schedule.by_row ? 1 : tiles / kLeastTilesPerPart,
                parts = wanted < most ? wanted : most;
  schedule.tiles_per_part = ceil_div(tiles, parts < 1 ? 1 : parts);
  schedule.parts = tiles == 0 ? 1 : ceil_div(tiles, schedule.tiles_per_part);
  return schedule;
}

// Query rows of a thread in the backward. fp64 has half as many, so that a block's shared memory fits into the 64 KB of
// compute capability 7.5, and its accumulators into registers.
template <class T>
constexpr int kPassRows = sizeof(T) == sizeof(double) ? kRows / 2 : kRows;
template <class T>
constexpr int kPassBlockQ = kSide * kPassRows<T>;

// The workspace that the backward's kernels share.
template <class T>
struct BackwardWorkspace {
  RowTerms<T> rows;
  T* dslopes;  // [B * H][query blocks]: partial sums of the slopes' gradients
  T* dmask_parts;  // [MaskSchedule's parts][the mask's elements]; empty if there is one part, which writes the gradient

  static BackwardWorkspace lay_out(Arena& arena, const BackwardParams& p, int64_t block_q = kPassBlockQ<T>) {
    const Sizes& z = p.sizes;
    const MaskGrad& g = p.dmask;
    const int64_t query_blocks = z.batch * z.heads * ceil_div(z.seqlen_q, block_q);
    const int64_t parts = g ? schedule_mask(p, block_q).parts : 1;
    return {RowTerms<T>::lay_out(arena, p), arena.take<T>(p.dalibi_slopes ? query_blocks : 0),
            arena.take<T>(parts == 1 ? 0 : parts * g.batch * g.heads * g.rows * g.cols)};
  }
};

// The same for the double backward. Its tiles have half the rows, because an element has four products instead of two.
template <class T>
constexpr int kDoubleRows = kPassRows<T> / 2;
template <class T>
constexpr int kDoubleBlockQ = kSide * kDoubleRows<T>;

template <class T>
struct DoubleBackwardWorkspace : BackwardWorkspace<T> {
  T *gamma, *sink_terms;  // with the rows of lse, as RowTerms

  static DoubleBackwardWorkspace lay_out(Arena& arena, const DoubleBackwardParams& p) {
    const int64_t rows = p.lse_size();
    return {BackwardWorkspace<T>::lay_out(arena, p, kDoubleBlockQ<T>), arena.take<T>(rows),
            arena.take<T>(p.dsink ? rows : 0)};
  }
};

}  // namespace flash_attn_ext::cuda::simt
