// How the backward is cut into blocks, and its workspace.
#pragma once

#include "../recompute_flags.h"
#include "../simt/plan.h"

namespace flash_attn_ext::cuda::sm80 {

// 64, 128, 192 or 256.
inline int padded_head_dim(const Sizes& z) {
  constexpr int kStep = 64;
  const int64_t widest = z.head_dim > z.head_dim_v ? z.head_dim : z.head_dim_v;
  return widest == 0 ? kStep : static_cast<int>(ceil_div(widest, kStep) * kStep);
}
// Query rows of a tile.
constexpr int backward_rows(int padded) { return padded == 64 ? 64 : 32; }

// A tile of dQ: the number of its fp32 sums, and of the count of blocks that have added to them.
struct QueryGradientTile {
  int64_t sums, turns;
};

// Tiles of dQ in a head of all packed sequences: each has its own from the first on, so that it adds at most one.
FA_HOST_DEVICE inline int64_t packed_tiles_of_head(const AttentionParams& call, int rows) {
  return call.varlen.total_q / rows + call.sizes.batch;
}

// The tiles of dQ in the call of one sequence. Packed sequences have their sums one behind the other, as their rows of q,
// but turns by themselves: where sequences overlap, nobody waits for a turn that another one took.
template <bool kPacked>
struct QueryGradientTiles {
  int heads, of_head;
  int64_t of_packed_head, first;

  FA_HOST_DEVICE QueryGradientTiles(const AttentionParams& call, const AttentionParams& p, int rows)
      : heads(call.sizes.heads), of_head(ceil_div(call.sizes.seqlen_q, rows)) {
    if constexpr (kPacked) {
      of_packed_head = packed_tiles_of_head(call, rows);
      first = p.varlen.first_q / rows;
    }
  }
  FA_HOST_DEVICE QueryGradientTile operator()(int64_t b, int64_t h, int64_t tile) const {
    const int64_t at = (b * heads + h) * of_head + tile;
    if constexpr (kPacked) return {h * of_packed_head + first + b + tile, at};
    return {at, at};
  }
};

struct BackwardWorkspace {
  simt::BackwardWorkspace<float> simt;  // of its steps: the terms of the rows, and what it computes once more
  RecomputeFlags flags;
  // From here on all is zero before the backward's kernel starts.
  int* ticket;  // blocks that have started
  int* turns;   // [B * H][query tiles]: blocks that have added their part of dq
  float* dq;    // [tiles][8 warps][elements of a thread][32 lanes]: each where its thread adds it
  size_t zeroed_bytes;

  static BackwardWorkspace plan(Arena& arena, const BackwardParams& p) {
    const Sizes& z = p.sizes;
    const int padded = padded_head_dim(z), rows = backward_rows(padded);
    const int64_t heads = z.batch * z.heads, tiles = heads * ceil_div(z.seqlen_q, rows);
    BackwardWorkspace w;
    w.simt = simt::BackwardWorkspace<float>::plan(arena, p);
    w.flags.queries = arena.take<int>(heads * RecomputeFlags::tiles(z.seqlen_q));
    w.flags.keys = arena.take<int>(z.batch * z.heads_kv * RecomputeFlags::tiles(z.seqlen_k));
    const size_t before = arena.used();
    w.ticket = arena.take<int>(1);
    w.turns = arena.take<int>(tiles);
    const int64_t sums = p.varlen ? z.heads * packed_tiles_of_head(p, rows) : tiles;
    w.dq = arena.take<float>(p.dq ? sums * rows * padded : 0);
    w.zeroed_bytes = arena.used() - before;
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::sm80
