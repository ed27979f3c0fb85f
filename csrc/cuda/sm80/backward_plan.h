// How the backward is cut into blocks, and its workspace.
#pragma once

#include "../recompute_flags.h"
#include "../simt/plan.h"

namespace flash_attn_ext::cuda::sm80 {

constexpr int kBackwardWarps = 8;
constexpr int kBackwardKeys = 16 * kBackwardWarps;  // a block's; a warp owns 16
inline int padded_head_dim(const Sizes& z) { return z.head_dim <= 64 && z.head_dim_v <= 64 ? 64 : 128; }
// Query rows of a tile: K, V, dS, two tiles of Q and one of dO fit into 99 KB, which every GPU has.
constexpr int backward_rows(int padded) { return padded == 64 ? 64 : 32; }

struct BackwardWorkspace {
  simt::BackwardWorkspace<float> simt;  // of its steps: the terms of the rows, and what it computes once more
  RecomputeFlags flags;
  // From here on all is zero before the backward's kernel starts.
  int* ticket;  // blocks that have started
  int* turns;   // [B * H][query tiles]: blocks that have added their part of dq
  float* dq;    // [B * H][query tiles][8 warps][16][32 lanes]: sums, each element where its thread adds it
  size_t zeroed_bytes;

  static BackwardWorkspace plan(Arena& arena, const BackwardParams& p) {
    const Sizes& z = p.sizes;
    const int padded = padded_head_dim(z);
    const int64_t heads = z.batch * z.heads, tiles = heads * ceil_div(z.seqlen_q, backward_rows(padded));
    BackwardWorkspace w;
    w.simt = simt::BackwardWorkspace<float>::plan(arena, p);
    w.flags.queries = arena.take<int>(heads * RecomputeFlags::tiles(z.seqlen_q));
    w.flags.keys = arena.take<int>(z.batch * z.heads_kv * RecomputeFlags::tiles(z.seqlen_k));
    const size_t before = arena.used();
    w.ticket = arena.take<int>(1);
    w.turns = arena.take<int>(tiles);
    w.dq = arena.take<float>(p.dq ? tiles * backward_rows(padded) * padded : 0);
    w.zeroed_bytes = arena.used() - before;
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::sm80
