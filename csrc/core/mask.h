// The band of the score matrix: which tiles it touches, and where it cuts a tile. Torch-free, host and
// device.
#pragma once

#include "host_device.h"
#include "params.h"

namespace flash_attn_ext {

struct Range {
  int64_t begin, end;  // half-open; empty if begin >= end
};

FA_HOST_DEVICE inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

FA_HOST_DEVICE inline bool in_band(const Band& band, int64_t i, int64_t j) {
  const int64_t distance = j - (i + band.diagonal);
  return -band.left <= distance && distance <= band.right;
}

// Keys that at least one of the query rows [i_begin, i_end) can see.
FA_HOST_DEVICE inline Range visible_keys(const Band& band, int64_t i_begin, int64_t i_end, int64_t seqlen_k) {
  return {clamp_to(i_begin + band.diagonal - band.left, 0, seqlen_k),
          clamp_to(i_end - 1 + band.diagonal + band.right + 1, 0, seqlen_k)};
}

// Query rows that can see at least one of the keys [j_begin, j_end).
FA_HOST_DEVICE inline Range visible_queries(const Band& band, int64_t j_begin, int64_t j_end,
                                            int64_t seqlen_q) {
  return {clamp_to(j_begin - band.diagonal - band.right, 0, seqlen_q),
          clamp_to(j_end - 1 - band.diagonal + band.left + 1, 0, seqlen_q)};
}

// True if every (i, j) of the tile [i_begin, i_end) x [j_begin, j_end) lies in the band: nothing to mask
// there.
FA_HOST_DEVICE inline bool band_covers(const Band& band, int64_t i_begin, int64_t i_end, int64_t j_begin,
                                       int64_t j_end) {
  const int64_t least = j_begin - (i_end - 1 + band.diagonal);
  const int64_t most = j_end - 1 - (i_begin + band.diagonal);
  return -band.left <= least && most <= band.right;
}

}  // namespace flash_attn_ext
