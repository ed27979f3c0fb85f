// Tile sizes, in one place. block_q must be a multiple of 16 (core/philox.h) and of the lanes, block_k of the
// lanes.

struct Tiling {
  int64_t block_q, block_k;
};

template <class T>
constexpr Tiling forward_tiling() {
  // S^T (block_k x block_q) and one K or V tile stay in L1; block_q is 3 or 6 vectors for the 3-vector
  // register tile.
  return {48, 64};
}

template <class T>
constexpr Tiling backward_tiling() {
  // P and dS (block_q x block_k each) in L1; K, V and their transposes, dK and dV in L2.
  return {64, 64};
}

// The sizes that scratch memory needs: a short sequence fills only part of its tiles.
inline Tiling fitted(const Tiling& t, const Sizes& z) {
  auto least = [](int64_t block, int64_t length) { return std::min(block, (length + 15) / 16 * 16); };
  return {least(t.block_q, z.seqlen_q), least(t.block_k, z.seqlen_k)};
}

// Decode, the forward for few queries: scores of a few rows and a converted V tile in L1.
template <class T>
constexpr int64_t decode_block_k() {
  return 64;
}
constexpr int64_t kDecodeTasks = 16;     // splits are made until there are so many tasks,
constexpr int64_t kDecodeMinBlocks = 4;  // but none of fewer key blocks: each costs a merge
constexpr int kPrefetchLevel = 3;  // of __builtin_prefetch: into L1, where the next tile's rows have room

// Up to here a query tile is mostly padding, and the keys are read faster than the tile is multiplied.
constexpr int64_t kDecodeMaxQueries = 8;
