// What tensor cores leave to the simt tier.
//
// A masked element of P or dS is 0, but in a matrix product 0 * NaN is NaN: a NaN or Inf in q, k, v or dout
// then reaches gradients of rows that are masked from it. It never stays unseen: such a gradient is not
// finite. So a kernel on tensor cores flags each tile of a gradient that holds something not finite, and
// simt's kernels, launched after it, compute just the flagged tiles once more, from visible pairs alone.
// Nobody waits for the GPU, and where all is finite, as it should be, those launches return at once.
#pragma once

#include "../core/params.h"

namespace flash_attn_ext::cuda {

constexpr int kRecomputedRows = 64;  // of a tile

struct RecomputeFlags {
  int* queries = nullptr;  // [B * H][tiles of S_q], for dq; null: every tile is computed
  int* keys = nullptr;     // [B * H_kv][tiles of S_k], for dk and dv; null: every tile is computed

  static FA_HOST_DEVICE int64_t tiles(int64_t seqlen) {
    return (seqlen + kRecomputedRows - 1) / kRecomputedRows;
  }
};

}  // namespace flash_attn_ext::cuda
