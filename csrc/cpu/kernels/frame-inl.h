// The place of a tile of scores.
#pragma once

#include "../vec/vec-inl.h"

// Where a tile lies. The forward keeps S^T (rows are keys, lanes are queries: row statistics become per-lane
// vectors); the backward keeps S (rows are queries, lanes are keys: K^T and V^T are packed once per key
// block).
struct TileFrame {
  int64_t b, h;
  int64_t i0, j0;         // first query, first key
  int64_t queries, keys;  // extents inside the tensor
  int64_t ld;             // lanes per row, whole vectors
  bool lanes_are_queries;

  int64_t rows() const { return lanes_are_queries ? keys : queries; }
  int64_t lanes() const { return lanes_are_queries ? queries : keys; }
};

// The keys that the forward's tiles cover for some queries: those that one of them sees. They begin where a cache line
// of a float mask and a pair of dropout's words (core/philox.h) may begin.
inline Range keys_of_tiles(const AttentionParams& p, int64_t i0, int64_t queries) {
  constexpr int64_t kAlignment = 16;
  const Range seen = visible_keys(p.band, i0, i0 + queries, p.sizes.seqlen_k);
  return {seen.begin / kAlignment * kAlignment, seen.end};
}
