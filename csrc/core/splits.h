// How the keys of a forward are split over tasks (Flash-Decoding), for all tiers.
#pragma once

#include "params.h"

namespace flash_attn_ext {

FA_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether a tier's kernel for few queries runs: for up to `few_queries` queries, or if the caller asks for splits or for
// the unified maximum.
inline bool is_decode(const AttentionParams& p, int64_t few_queries) {
  return p.sizes.seqlen_q <= few_queries || p.decode.num_splits > 1 || p.decode.has_unified_max;
}

// The maximum number of splits, also if the caller asks for more. Each split stores a row of O for each query. With 4 splits,
// or with splits * S_q <= S_k, this memory is linear in S_q and S_k.
inline int64_t most_splits(const Sizes& z) {
  constexpr int64_t kAlways = 4, kOfAGrid = 65535;  // blocks along a CUDA grid's z
  const int64_t by_rows = z.seqlen_q > 0 ? z.seqlen_k / z.seqlen_q : kAlways;
  return by_rows < kAlways ? kAlways : (by_rows > kOfAGrid ? kOfAGrid : by_rows);
}

struct KeySplits {
  int64_t splits, tiles_per_split;
};

// Cuts `tiles` of keys into equal pieces. Their number is the caller's num_splits, or `by_shape` if it is 0.
inline KeySplits split_keys(const AttentionParams& p, int64_t tiles, int64_t by_shape) {
  if (tiles <= 0) return {1, 0};
  const int64_t most = most_splits(p.sizes) < tiles ? most_splits(p.sizes) : tiles;
  int64_t splits = p.decode.num_splits > 0 ? p.decode.num_splits : by_shape;
  splits = splits < 1 ? 1 : (splits > most ? most : splits);
  const int64_t tiles_per_split = ceil_div(tiles, splits);
  return {ceil_div(tiles, tiles_per_split), tiles_per_split};
}

}  // namespace flash_attn_ext
