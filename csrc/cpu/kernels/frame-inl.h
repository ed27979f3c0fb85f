// The position of a tile in the matrix of scores.
#pragma once

#include "../vec/vec-inl.h"

// Position and layout of a tile. The forward stores S^T: rows are keys and lanes are queries, so row statistics are
// vectors, one lane per query. The backward stores S: rows are queries and lanes are keys, so K^T and V^T are packed
// once per key block.
struct TileFrame {
  int64_t b, h;
  int64_t i0, j0;         // first query, first key
  int64_t queries, keys;  // extents inside the tensor
  int64_t ld;             // lanes per row, whole vectors
  bool lanes_are_queries;

  int64_t rows() const { return lanes_are_queries ? keys : queries; }
  int64_t lanes() const { return lanes_are_queries ? queries : keys; }
};

// Returns the range of keys that the tiles of some queries cover: the visible keys. It begins at a multiple of 16,
// because a cache line of a float mask and a pair of Philox words (core/philox.h) do.
inline Range keys_of_tiles(const AttentionParams& p, int64_t i0, int64_t queries) {
  constexpr int64_t kAlignment = 16;
  const Range seen = visible_keys(p.band, i0, i0 + queries, p.sizes.seqlen_k);
  return {seen.begin / kAlignment * kAlignment, seen.end};
}
