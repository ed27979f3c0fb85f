// The band of the score matrix: which tiles it touches, and where it cuts a tile. Torch-free, host and
// device. A DiagonalBand has no chunks; the type decides at compile time, so its kernels contain no division.
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

FA_HOST_DEVICE inline bool in_band(const DiagonalBand& band, int64_t i, int64_t j) {
  const int64_t distance = j - (i + band.diagonal);
  return -band.left <= distance && distance <= band.right;
}

// Keys that at least one of the query rows [i_begin, i_end) can see.
FA_HOST_DEVICE inline Range visible_keys(const DiagonalBand& band, int64_t i_begin, int64_t i_end,
                                         int64_t seqlen_k) {
  return {clamp_to(i_begin + band.diagonal - band.left, 0, seqlen_k),
          clamp_to(i_end - 1 + band.diagonal + band.right + 1, 0, seqlen_k)};
}

// Query rows that can see at least one of the keys [j_begin, j_end).
FA_HOST_DEVICE inline Range visible_queries(const DiagonalBand& band, int64_t j_begin, int64_t j_end,
                                            int64_t seqlen_q) {
  return {clamp_to(j_begin - band.diagonal - band.right, 0, seqlen_q),
          clamp_to(j_end - 1 - band.diagonal + band.left + 1, 0, seqlen_q)};
}

// True if every (i, j) of the tile [i_begin, i_end) x [j_begin, j_end) lies in the band: nothing to mask
// there.
FA_HOST_DEVICE inline bool band_covers(const DiagonalBand& band, int64_t i_begin, int64_t i_end,
                                       int64_t j_begin, int64_t j_end) {
  const int64_t least = j_begin - (i_end - 1 + band.diagonal);
  const int64_t most = j_end - 1 - (i_begin + band.diagonal);
  return -band.left <= least && most <= band.right;
}

// Returns the part of `range` in the chunks of the positions first to last. `offset`: the position of row 0 of the range.
FA_HOST_DEVICE inline Range within_chunks(const Chunks& chunks, Range range, int64_t first, int64_t last,
                                          int64_t offset) {
  if (!chunks) return range;
  return {clamp_to(chunks.begin(first) - offset, range.begin, range.end),
          clamp_to(chunks.begin(last) + chunks.size - offset, range.begin, range.end)};
}

FA_HOST_DEVICE inline bool in_band(const Band& band, int64_t i, int64_t j) {
  return in_band(band.without_chunks(), i, j) && band.chunks.same(i + band.diagonal, j);
}

FA_HOST_DEVICE inline Range visible_keys(const Band& band, int64_t i_begin, int64_t i_end, int64_t seqlen_k) {
  return within_chunks(band.chunks, visible_keys(band.without_chunks(), i_begin, i_end, seqlen_k),
                       i_begin + band.diagonal, i_end - 1 + band.diagonal, 0);
}

FA_HOST_DEVICE inline Range visible_queries(const Band& band, int64_t j_begin, int64_t j_end,
                                            int64_t seqlen_q) {
  return within_chunks(band.chunks, visible_queries(band.without_chunks(), j_begin, j_end, seqlen_q), j_begin,
                       j_end - 1, band.diagonal);
}

FA_HOST_DEVICE inline bool band_covers(const Band& band, int64_t i_begin, int64_t i_end, int64_t j_begin,
                                       int64_t j_end) {
  return band_covers(band.without_chunks(), i_begin, i_end, j_begin, j_end) &&
         band.chunks.same(i_begin + band.diagonal, i_end - 1 + band.diagonal) &&
         band.chunks.same(i_begin + band.diagonal, j_begin) && band.chunks.same(j_begin, j_end - 1);
}

}  // namespace flash_attn_ext
