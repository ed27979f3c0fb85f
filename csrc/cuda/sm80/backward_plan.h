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

// 4-byte elements, behind those that simt needs for its steps.
struct BackwardWorkspace {
  simt::RowTerms<float> terms;  // the first of simt's
  RecomputeFlags flags;
  // From here on all is zero before the backward's kernel starts.
  int* ticket;  // blocks that have started
  int* turns;   // [B * H][query tiles]: blocks that have added their part of dq
  float* dq;    // [B * H][query tiles][8 warps][16][32 lanes]: sums, each element where its thread adds it
  int64_t zeroed_elements, elements;

  BackwardWorkspace(void* workspace, const BackwardParams& p) : terms(workspace, p) {
    const Sizes& z = p.sizes;
    const int padded = padded_head_dim(z);
    const int64_t heads = z.batch * z.heads, tiles = heads * ceil_div(z.seqlen_q, backward_rows(padded));
    int* const first = static_cast<int*>(workspace);
    flags.queries = first + simt::backward_elements(p);
    flags.keys = flags.queries + heads * RecomputeFlags::tiles(z.seqlen_q);
    ticket = flags.keys + z.batch * z.heads_kv * RecomputeFlags::tiles(z.seqlen_k);
    turns = ticket + 1;
    dq = reinterpret_cast<float*>(turns + tiles);
    zeroed_elements = 1 + tiles + (p.dq ? tiles * backward_rows(padded) * padded : 0);
    elements = ticket - first + zeroed_elements;
  }
};

}  // namespace flash_attn_ext::cuda::sm80
