// The differences between kernels with functions of the user (flex_functions.cuh) and the plain kernels. The plain
// kernels have NoFunctions, which compiles to no instructions: they visit every tile in the band, and change no score.
#pragma once

#include "../../core/mask.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Every tile of the keys that the band shows.
template <int kBlockK>
struct BandTiles {
  struct Tile {
    int j0;
  };
  const Range& keys;

  __device__ Tile first() const { return {static_cast<int>(keys.begin)}; }
  __device__ Tile after(Tile tile) const { return {tile.j0 + kBlockK}; }
};

// The steps of a block of keys in the backward: each tile of queries in the band, for each head of the group.
struct BandSteps {
  struct Step {
    int head, tile;  // head of the group; tile of the head
  };
  int group, first_tile, end_tile;

  __device__ Step first() const { return {first_tile < end_tile ? 0 : group, first_tile}; }
  __device__ Step after(Step step) const {
    return step.tile + 1 < end_tile ? Step{step.head, step.tile + 1} : Step{step.head + 1, first_tile};
  }
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

  // The backward.
  template <class C>
  __device__ BandSteps steps(const AttentionParams&, int64_t, int64_t, int group, int64_t, int first_tile,
                             int end_tile) const {
    return {group, first_tile, end_tile};
  }
  // The blocks of keys in (block, last] that visit the query tile of a position.
  template <class C, class Position>
  __device__ int blocks_between(const AttentionParams&, const Position&, int64_t, int block,
                                int64_t last) const {
    return static_cast<int>(last - block);
  }
  template <int N>
  struct OldScores {};
  template <class Position, int N>
  __device__ void recompute_new_scores(const AttentionParams&, const Position&, float (&)[N][4],
                                       float (&)[N][4], uint32_t&, OldScores<N>&) const {}
  template <class Position, int N>
  __device__ void change_gradients(const AttentionParams&, const Position&, OldScores<N>&,
                                   float (&)[N][4]) const {}
  // One element, for repair.cuh.
  __device__ bool hides(const AttentionParams&, const ElementIndex&, float) const { return false; }
  __device__ float new_score(const AttentionParams&, const ElementIndex&, float score) const { return score; }
  __device__ float old_gradient(const AttentionParams&, const ElementIndex&, float, float gradient) const {
    return gradient;
  }
};

}  // namespace flash_attn_ext::cuda::sm80
