// Tiles of a gradient that the sm80 tier computes on tensor cores and the simt tier computes once more.
//
// A masked element of P or dS is 0, but in a matrix product 0 * NaN is NaN. So a NaN or Inf in q, k, v or
// dout can reach gradients of rows that are masked from it. Such a gradient is never finite. Therefore a
// kernel on tensor cores flags each tile of a gradient that holds something not finite. simt's kernels,
// launched after it, compute the flagged tiles once more, from visible pairs alone. The host does not wait
// for the GPU. Where no tile is flagged, these launches return at once.
#pragma once

#include "../core/params.h"
#include "../core/splits.h"

namespace flash_attn_ext::cuda {

constexpr int kRecomputedRows = 64;  // of a tile

struct RecomputeFlags {
  int* queries = nullptr;  // [B * H][tiles of S_q], for dq; null: every tile is computed
  int* keys = nullptr;     // [B * H_kv][tiles of S_k], for dk and dv; null: every tile is computed

  static FA_HOST_DEVICE int64_t tiles(int64_t seqlen) { return ceil_div(seqlen, kRecomputedRows); }
};

}  // namespace flash_attn_ext::cuda
