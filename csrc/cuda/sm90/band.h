// The band of the score matrix, as the kernels of this tier ask for it.
#pragma once

#include "../../core/mask.h"
#include "plan.h"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

// The band in 32 bits: row i sees the keys from i + low on, below i + high and below the end.
struct ShortBand {
  int low, high, seqlen_q, seqlen_k;

  __device__ explicit ShortBand(const AttentionParams& p)
      : low(clamp_to(p.band.diagonal - p.band.left, -kMaxLength, kMaxLength)),
        high(clamp_to(p.band.diagonal + p.band.right + 1, -kMaxLength, kMaxLength)),
        seqlen_q(p.sizes.seqlen_q),
        seqlen_k(p.sizes.seqlen_k) {}

  __device__ int begin(int row) const { return row + low; }
  __device__ int end(int row) const { return min(row + high, seqlen_k); }
  // The rows that see a key.
  __device__ int begin_row(int key) const { return key - high + 1; }
  __device__ int end_row(int key) const { return key < seqlen_k ? min(key - low + 1, seqlen_q) : 0; }
  // Nothing to hide from any of the rows.
  __device__ bool shows_all(int first_row, int rows, int first_key, int keys) const {
    return begin(first_row + rows - 1) <= first_key && first_key + keys <= end(first_row);
  }
};

}  // namespace flash_attn_ext::cuda::sm90
