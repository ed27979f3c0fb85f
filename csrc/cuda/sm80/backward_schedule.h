// Cuts the backward into blocks, and lays out its workspace.
#pragma once

#include "../product_scale.h"
#include "../simt/schedule.h"
#include "gpu.h"

namespace flash_attn_ext::cuda::sm80 {

// The head dimension of the kernel: 64, 128, 192 or 256.
FA_HOST_DEVICE inline int padded_head_dim(const Sizes& z) {
  constexpr int kStep = 64;
  const int64_t widest = z.head_dim > z.head_dim_v ? z.head_dim : z.head_dim_v;
  return widest == 0 ? kStep : static_cast<int>(ceil_div(widest, kStep) * kStep);
}
// The query rows of a tile, and the keys of a block.
struct BackwardTiles {
  int rows, keys;
};
template <class Gpu>
constexpr BackwardTiles backward_tiles(int padded) {
  if (!Gpu::kAsyncCopies) return {32, padded == 64 ? 128 : 64};  // 64 KB of shared memory
  return {padded == 64 ? 64 : 32, padded <= 128 ? 128 : 64};
}

// Flags the pieces of kFlaggedRows rows of a gradient that contain a NaN. repair.cuh repairs these pieces.
constexpr int kFlaggedRows = 64;
struct NanFlags {
  int* queries = nullptr;  // [B * H][tiles of S_q], of dq
  int* keys = nullptr;     // [B * H_kv][tiles of S_k], of dk and dv

  static FA_HOST_DEVICE int64_t tiles(int64_t seqlen) { return ceil_div(seqlen, kFlaggedRows); }
};

// The indices of a tile of dQ: of its fp32 sums, and of its count of blocks that have added.
struct QueryGradientTile {
  int64_t sums, turns;
};

// The tiles of dQ in a head of all packed sequences. Each sequence starts a new tile, so it adds at most one tile.
FA_HOST_DEVICE inline int64_t packed_tiles_of_head(const AttentionParams& call, int rows) {
  return call.varlen.total_q / rows + call.sizes.batch;
}

// Finds the tiles of dQ of one sequence. Packed sequences have consecutive sums, in the order of their rows in q. The
// counts of turns are separate for each sequence, because sequences may overlap in q and must not wait for each other.
template <bool kPacked>
struct QueryGradientTiles {
  int heads, of_head;
  int64_t of_packed_head = 0, first = 0;  // of_packed_head 0: the call is not packed

  FA_HOST_DEVICE QueryGradientTiles(const AttentionParams& call, const AttentionParams& p, int rows)
      : heads(call.sizes.heads), of_head(ceil_div(call.sizes.seqlen_q, rows)) {
    if constexpr (kPacked) {
      if (!call.varlen) return;
      of_packed_head = packed_tiles_of_head(call, rows);
      first = p.varlen.first_q / rows;
    }
  }
  FA_HOST_DEVICE QueryGradientTile operator()(int64_t b, int64_t h, int64_t tile) const {
    const int64_t at = (b * heads + h) * of_head + tile;
    if constexpr (kPacked)
      if (of_packed_head > 0) return {h * of_packed_head + first + b + tile, at};
    return {at, at};
  }
};

struct BackwardWorkspace {
  simt::BackwardWorkspace<float>
      simt;  // the terms of the rows, and memory for the gradients of mask and slopes
  NanFlags flags;
  // From here on, all memory is zero before the backward's kernel starts.
  int* ticket;  // blocks that have started
  int* turns;   // [B * H][query tiles]: blocks that have added their part of dq
  float* dq;    // [tiles][8 warps][elements of a thread][32 lanes]: the order in which threads add
  size_t zeroed_bytes;
  // Factors of the call, as float: so that the kernels' loops convert no double.
  float score_scale, keep_scale;  // product_scale(); 1 / (1 - dropout_p)
  BackwardTiles tiles;

  template <class Gpu = Ampere>
  static BackwardWorkspace lay_out(Arena& arena, const BackwardParams& p) {
    return lay_out_after<Gpu>(simt::BackwardWorkspace<float>::lay_out(arena, p), arena, p,
                              padded_head_dim(p.sizes));
  }
  template <class Gpu = Ampere>
  static BackwardWorkspace lay_out_after(const simt::BackwardWorkspace<float>& simt, Arena& arena,
                                         const BackwardParams& p, int padded) {
    const Sizes& z = p.sizes;
    const int rows = backward_tiles<Gpu>(padded).rows;
    const int64_t heads = z.batch * z.heads, tiles = heads * ceil_div(z.seqlen_q, rows);
    BackwardWorkspace w;
    w.simt = simt;
    w.flags.queries = arena.take<int>(heads * NanFlags::tiles(z.seqlen_q));
    w.flags.keys = arena.take<int>(z.batch * z.heads_kv * NanFlags::tiles(z.seqlen_k));
    const size_t before = arena.used();
    w.ticket = arena.take<int>(1);
    w.turns = arena.take<int>(tiles);
    const int64_t sums = p.varlen ? z.heads * packed_tiles_of_head(p, rows) : tiles;
    w.dq = arena.take<float>(p.dq ? sums * rows * padded : 0);
    w.zeroed_bytes = arena.used() - before;
    w.tiles = backward_tiles<Gpu>(padded);
    w.score_scale = product_scale<float>(p);
    w.keep_scale = p.dropout ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::sm80
