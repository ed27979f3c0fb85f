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
