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

// The keys of a tile of S^T that its queries see. On the diagonal of a causal mask, the first queries see the fewest keys: the
// products and the softmax leave out the other keys.
struct KeyStairs {
  static constexpr int64_t kQueries = 16;  // of a step
  static constexpr int64_t kMostSteps = 4;

  int64_t steps = 1;
  int64_t keys[kMostSteps];  // ascending: the queries of step n see no key from keys[n] on

  explicit KeyStairs(const TileFrame& f) : keys{f.keys} {}
  // Masks and functions may need the scores of hidden keys.
  KeyStairs(const AttentionParams& p, const TileFrame& f) : KeyStairs(f) {
    if (p.mask || p.functions || f.queries > kMostSteps * kQueries) return;
    steps = ceil_div(f.queries, kQueries);
    for (int64_t n = 0; n < steps; ++n) {
      const int64_t first = f.i0 + n * kQueries, end = std::min(first + kQueries, f.i0 + f.queries);
      const int64_t seen = visible_keys(p.band, first, end, f.j0 + f.keys).end - f.j0;
      keys[n] = clamp_to(ceil_div(seen, kQueries) * kQueries, n > 0 ? keys[n - 1] : 0, f.keys);
    }
  }
  // The keys of the queries in lane `lane` of S^T.
  int64_t keys_of(int64_t lane) const { return keys[std::min(lane / kQueries, steps - 1)]; }

  // Calls body(begin, end, lane) for parts of the rows [first, last) of S^T: lanes from `lane` on see the keys [begin, end).
  template <class Body>
  void for_each_step(int64_t first, int64_t last, const Body& body) const {
    for (int64_t n = 0; n < steps && first < last; ++n) {
      const int64_t end = std::min(keys[n], last);
      if (first < end) body(first, end, n * kQueries);
      first = std::max(first, end);
    }
  }
  // Calls body(query, end, keys) for runs of the queries [query, end) that see the same keys.
  template <class Body>
  void for_each_run(int64_t queries, const Body& body) const {
    for (int64_t n = 0, next; n < steps; n = next) {
      for (next = n + 1; next < steps && keys[next] == keys[n];) ++next;
      body(n * kQueries, next < steps ? next * kQueries : queries, keys[n]);
    }
  }
};
