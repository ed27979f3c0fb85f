// How a call is cut into blocks, from its shape alone, so that results do not depend on the machine.
#pragma once

#include "../../core/params.h"
#include "../../core/splits.h"

namespace flash_attn_ext::cuda::simt {

constexpr int kSide = 16;  // a block is a square of 16 x 16 threads
// The launch bounds ask for one block of this size on a multiprocessor. For two, a thread would have half the
// registers, and spill.
constexpr int kThreads = kSide * kSide;
constexpr int kBlockK = 64;                        // keys of a tile
constexpr int kRows = 4, kDecodeRows = 1;          // query rows of a thread
constexpr int kBlockQ = kSide * kRows;             // query rows of a tile
constexpr int kNarrowSlice = 64, kMaxSlice = 128;  // columns of a result that a block owns

constexpr int slice_of(int64_t columns) { return columns <= kNarrowSlice ? kNarrowSlice : kMaxSlice; }

struct ForwardPlan {
  // Few queries: tiles of 16 rows, which the heads that share a key head fill together, so that K and V are
  // read once for all of them.
  bool decode;
  int64_t heads_per_tile;
  int64_t row_blocks;  // per batch and tile of heads
  int64_t tasks;       // row blocks of all batches and heads
  int64_t slices;      // of the D_v columns
  int64_t splits;      // of the keys; combine.cu merges them
  int64_t tiles_per_split;
};

inline ForwardPlan plan_forward(const AttentionParams& p) {
  constexpr int64_t kWantedBlocks = 256;      // about two for each multiprocessor of a large GPU
  constexpr int64_t kLeastTilesPerSplit = 4;  // below this, merging costs more than it wins
  const Sizes& z = p.sizes;
  ForwardPlan plan;
  plan.decode = z.seqlen_q <= kSide;
  plan.heads_per_tile = plan.decode && z.heads_kv > 0 ? z.heads / z.heads_kv : 1;
  plan.row_blocks = ceil_div(z.seqlen_q * plan.heads_per_tile, kSide * (plan.decode ? kDecodeRows : kRows));
  plan.tasks = plan.heads_per_tile == 0 ? 0 : z.batch * (z.heads / plan.heads_per_tile) * plan.row_blocks;
  plan.slices = ceil_div(z.head_dim_v, slice_of(z.head_dim_v));

  const int64_t tiles = ceil_div(z.seqlen_k, kBlockK), blocks = plan.tasks * plan.slices;
  const int64_t wanted = blocks > 0 ? ceil_div(kWantedBlocks, blocks) : 1, most = tiles / kLeastTilesPerSplit;
  const KeySplits cut = split_keys(p, tiles, wanted < most ? wanted : most);
  plan.splits = cut.splits;
  plan.tiles_per_split = cut.tiles_per_split;
  return plan;
}

// What the backward kernels know of each query row: P = e^((S - reference) - correction), and delta. The reference
// is lse and the correction 0; where lse is too large to be exact, they are the row's maximum m and log l.
template <class T>
struct RowTerms {
  T *delta, *reference, *correction;  // in the form of lse
  T* dslopes;                         // [B * H][query blocks]: partial sums of the slopes' gradients
  T* dmask_parts;                     // MaskPlan's

  RowTerms(void* workspace, const AttentionParams& p) {
    const int64_t rows = p.statistics_rows();
    delta = static_cast<T*>(workspace);
    reference = delta + rows;
    correction = reference + rows;
    dslopes = correction + rows;
    dmask_parts = static_cast<T*>(workspace) + elements(p);
  }
  static int64_t elements(const AttentionParams& p) {
    const Sizes& z = p.sizes;
    return 3 * p.statistics_rows() + z.batch * z.heads * ceil_div(z.seqlen_q, kBlockQ);
  }
};

// The gradient of the mask: a tile of the mask's own elements takes the sum of all score tiles that share it.
// Where a mask that is broadcast has few tiles, that sum is cut into parts, which dmask_sum_kernel adds in
// order.
struct MaskPlan {
  int64_t row_blocks, col_blocks;                    // tiles of the mask's rows and columns
  int64_t tasks;                                     // tiles of all its batches and heads
  int64_t batches, heads, query_blocks, key_blocks;  // that share a tile: 1 where the mask has the dimension
  int64_t parts, tiles_per_part;
};

FA_HOST_DEVICE inline MaskPlan plan_mask(const Sizes& z, const MaskGrad& g) {
  constexpr int64_t kWantedBlocks = 256, kLeastTilesPerPart = 4;  // as for the forward's splits
  MaskPlan plan;
  plan.row_blocks = ceil_div(g.rows, kBlockQ);
  plan.col_blocks = ceil_div(g.cols, kBlockK);
  plan.tasks = g.batch * g.heads * plan.row_blocks * plan.col_blocks;
  plan.batches = g.batch == 1 ? z.batch : 1;
  plan.heads = g.heads == 1 ? z.heads : 1;
  plan.query_blocks = g.rows == 1 ? ceil_div(z.seqlen_q, kBlockQ) : 1;
  plan.key_blocks = g.cols == 1 ? ceil_div(z.seqlen_k, kBlockK) : 1;

  const int64_t tiles = plan.batches * plan.heads * plan.query_blocks * plan.key_blocks;
  const int64_t wanted = plan.tasks > 0 ? ceil_div(kWantedBlocks, plan.tasks) : 1;
  const int64_t most = tiles / kLeastTilesPerPart, parts = wanted < most ? wanted : most;
  plan.tiles_per_part = ceil_div(tiles, parts < 1 ? 1 : parts);
  plan.parts = tiles == 0 ? 1 : ceil_div(tiles, plan.tiles_per_part);
  return plan;
}

// The parts of the mask's gradient, [parts][the mask's elements]; none where one part writes the gradient.
inline int64_t mask_part_elements(const Sizes& z, const MaskGrad& g) {
  const int64_t parts = g ? plan_mask(z, g).parts : 1;
  return parts == 1 ? 0 : parts * g.batch * g.heads * g.rows * g.cols;
}

// Of the backward's workspace.
inline int64_t backward_elements(const BackwardParams& p) {
  return RowTerms<char>::elements(p) + mask_part_elements(p.sizes, p.dmask);
}

inline int64_t accumulator_bytes(const AttentionParams& p) { return p.dtype == DType::kFloat64 ? 8 : 4; }

}  // namespace flash_attn_ext::cuda::simt
