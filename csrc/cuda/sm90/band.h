// The band of the score matrix in the form of this tier's kernels.
#pragma once

#include "../../core/mask.h"
#include "ptx.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::sm90 {

// The band in 32 bits: row i sees the keys [i + low, min(i + high, seqlen_k)). It is a kernel argument, because
// instructions can read arguments as operands.
struct ShortBand {
  int low, high, seqlen_q, seqlen_k;

  ShortBand() = default;
  FA_HOST_DEVICE explicit ShortBand(const AttentionParams& p)
      : low(static_cast<int>(clamp_to(p.band.diagonal - p.band.left, -kMaxLength, kMaxLength))),
        high(static_cast<int>(clamp_to(p.band.diagonal + p.band.right + 1, -kMaxLength, kMaxLength))),
        seqlen_q(static_cast<int>(p.sizes.seqlen_q)),
        seqlen_k(static_cast<int>(p.sizes.seqlen_k)) {}

  __device__ int begin(int row) const { return row + low; }
  __device__ int end(int row) const { return min(row + high, seqlen_k); }
  // The keys that the rows [first_row, end_row) see.
  __device__ Range keys_of_rows(int first_row, int end_row) const {
    return {min(max(begin(first_row), 0), seqlen_k), max(end(min(end_row, seqlen_q) - 1), 0)};
  }
  // The query rows that see a key.
  __device__ int begin_row(int key) const { return key - high + 1; }
  __device__ int end_row(int key) const { return key < seqlen_k ? min(key - low + 1, seqlen_q) : 0; }
  // Whether all of these rows see all of these keys. & instead of &&, because && would be branches.
  __device__ bool shows_all(int first_row, int rows, int first_key, int keys) const {
    return (begin(first_row + rows - 1) <= first_key) & (first_key + keys <= end(first_row));
  }
};

// Whether the masks show key j. This tier runs only masks with one bool for each key.
__device__ inline bool mask_shows_key(const MaskParams& mask, int64_t b, int64_t j) {
  const auto* first = static_cast<const uint8_t*>(mask.data);
  const auto* second = static_cast<const uint8_t*>(mask.key_data);
  return first[b * mask.stride_b + j * mask.stride_k] &&
         (!second || second[b * mask.key_stride_b + j * mask.key_stride_k]);
}

// A thread holds the columns 8 n and 8 n + 1 of a row, counted from its first column. Returns the number of these
// columns before column x; negative for a negative x.
__device__ inline int columns_before(int x) { return (x >> 3) * 2 + min(x & 7, 2); }

// Bit 2 n + e: begin <= 8 n + e < end, for n below 16.
__device__ inline uint32_t columns_between(int begin, int end) {
  const int first = max(columns_before(begin), 0);
  return ptx::bit_mask(first, max(columns_before(end) - first, 0));
}

}  // namespace flash_attn_ext::cuda::sm90
