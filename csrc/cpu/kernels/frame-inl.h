// The keys of the tiles of some queries (tile_frame.h: the position of a tile in the matrix of scores).
#pragma once

#include "../vec/vec-inl.h"

// FA_TILE_FUNCTIONS: another table's functions of a tile (tile_frame.h), which these kernels call. Int8 kernels define it
// themselves.
#if !defined(FA_TILE_FUNCTIONS) && defined(FA_OTHER_DTYPES) && !defined(FA_TESTED_PASSES_ONLY)
#define FA_TILE_FUNCTIONS FA_OTHER_DTYPES->tile_functions
#endif

// Returns the range of keys that the tiles of some queries cover: the visible keys. It begins at a multiple of 16,
// because a cache line of a float mask and a pair of Philox words (core/philox.h) do.
inline Range keys_of_tiles(const AttentionParams& p, int64_t i0, int64_t queries) {
  constexpr int64_t kAlignment = 16;
  const Range seen = visible_keys(p.band, i0, i0 + queries, p.sizes.seqlen_k);
  return {seen.begin / kAlignment * kAlignment, seen.end};
}
