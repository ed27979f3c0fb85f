// Cuts the queries of a head into the row tiles of the forward.
#pragma once

#include "tiling-inl.h"

// Without a block mask, a tile has block_q queries of forward_tiling(). With a block mask, no tile crosses the edge
// between two rows of blocks, because it would visit the visible blocks of both. Blocks of 128 queries are cut into
// 48 + 48 + 32.
struct RowTiles {
  static constexpr int64_t kUnit = 16;  // core/philox.h

  int64_t queries;    // the queries of the head
  int64_t block;      // queries of a row of blocks, whole units
  int64_t per_block;  // tiles of a row of blocks

  // Returns the first query of tile n.
  int64_t begin(int64_t n) const {
    const int64_t units = ceil_div(n % per_block * (block / kUnit), per_block);
    return std::min(queries, n / per_block * block + units * kUnit);
  }
  Range at(int64_t n) const { return {begin(n), begin(n + 1)}; }
  int64_t count() const {
    int64_t n = queries / block * per_block;
    while (begin(n) < queries) ++n;
    return n;
  }
};

template <class T>
RowTiles row_tiles(const AttentionParams& p) {
  constexpr int64_t kTile = forward_tiling<T>().block_q, kLeastBlock = 2 * RowTiles::kUnit;
  const int64_t queries = p.sizes.seqlen_q;
  const int64_t block = p.functions && p.functions->blocks ? p.functions->blocks.block_q : 0;
  // In a cache, query 0 may be inside a block.
  const bool has_edges =
      block >= kLeastBlock && block % RowTiles::kUnit == 0 && block < queries && first_query_index(p) == 0;
  if (!has_edges) return {queries, kTile, 1};
  return {queries, block, ceil_div(block, kTile)};
}
