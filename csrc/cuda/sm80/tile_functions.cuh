// Where kernels with functions of the user (flex_functions.cuh) differ from the plain kernels. The plain ones have
// NoFunctions, which compiles to nothing: they visit every tile in the band, and change no score.
#pragma once

#include "../../core/mask.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Every tile of the keys that the band shows.
template <int kBlockK>
struct BandTiles {
  struct Tile {
    int64_t j0;
  };
  const Range& keys;

  __device__ Tile first() const { return {keys.begin}; }
  __device__ Tile after(Tile tile) const { return {tile.j0 + kBlockK}; }
};

struct NoFunctions {
  static constexpr bool kAlsoDense = false;  // a kernel of packed sequences computes other calls, too

  template <class C>
  __device__ BandTiles<C::kBlockK> tiles(const AttentionParams&, int64_t, int64_t, int64_t,
                                         const Range& keys) const {
    return {keys};
  }
  template <int N, class Tile, class Position>
  __device__ Position shown(const AttentionParams&, const Tile&, const Position& at) const {
    return at;
  }
  template <class Tile>
  __device__ bool may_hide(const Tile&) const {
    return false;
  }
  __device__ bool changes_scores() const { return false; }
  template <int N, class Position>
  __device__ void change_scores(const AttentionParams&, const Position&, float (&)[N][4], uint32_t&) const {}
};

}  // namespace flash_attn_ext::cuda::sm80
