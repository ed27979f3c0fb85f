// Tiles of the score matrix that a block mask shows, for the tiers on tensor cores. Tiles need not divide a block.
#pragma once

#include <cuda_runtime.h>

#include "../core/program.h"
#include "simt/functions.h"

namespace flash_attn_ext::cuda {

// The state of a tile that is not hidden, from its blocks.
enum class TileState {
  kFull,     // all of its elements are shown
  kPartial,  // the mask function decides on each element
  kMixed,    // its blocks differ: each element's block decides
};

// A tile of a list, and its form in memory.
struct ListedTile {
  int number;
  TileState state;

  __device__ ListedTile(int number, TileState state) : number(number), state(state) {}
  __device__ explicit ListedTile(int32_t word) : number(word / 4), state(static_cast<TileState>(word % 4)) {}
  __device__ int32_t word() const { return number * 4 + static_cast<int>(state); }
};

inline __device__ TileState state_of(const StatesOfTile& states) {
  if (states.is_full()) return TileState::kFull;
  const bool all_partial = states.lowest == BlockStates::kPartial && states.highest == BlockStates::kPartial;
  return all_partial ? TileState::kPartial : TileState::kMixed;
}

// Returns the states of the blocks that overlap queries [i_begin, i_end) and keys [j_begin, j_end) of one sequence. For a
// call that can be a cache, `queries_before` is BlockStates::queries_before.
inline __device__ StatesOfTile states_of_tile(const AttentionParams& p,
                                              const simt::DeviceFunctions& functions, int64_t b, int64_t h,
                                              int64_t i_begin, int64_t i_end, int64_t j_begin, int64_t j_end,
                                              int64_t queries_before = 0) {
  const int64_t first = first_query_index(p) + queries_before;
  return {functions.blocks, bool(functions.mask), b, h, first + i_begin, first + i_end, j_begin, j_end};
}

// Finds the tiles of a row (or a column) of tiles that are not hidden. A warp looks up 32 tiles at once, one for each
// lane, and stores the answers as bits. All lanes of the warp call its functions together.
class TileSearch {
 public:
  // The first tile in [tile, end) that is not hidden, or `end`. `states_of(tile)`: the StatesOfTile.
  template <class StatesOf>
  __device__ int next(int tile, int end, const StatesOf& states_of) {
    while (tile < end) {
      if (tile < first_ || tile >= first_ + kLanes) look_up(tile, end, states_of);
      const uint32_t shown = shown_ >> (tile - first_);
      if (shown != 0) return tile + __ffs(shown) - 1;
      tile = first_ + kLanes;
    }
    return end;
  }
  // The state of the tile that next() has just found.
  __device__ TileState state(int tile) const {
    const int bit = tile - first_;
    return full_ >> bit & 1 ? TileState::kFull : mixed_ >> bit & 1 ? TileState::kMixed : TileState::kPartial;
  }

 private:
  static constexpr int kLanes = 32;
  int first_ = -kLanes;
  uint32_t shown_ = 0, full_ = 0, mixed_ = 0;  // bit n: of tile first_ + n

  template <class StatesOf>
  __device__ void look_up(int first, int end, const StatesOf& states_of) {
    const int tile = first + static_cast<int>(threadIdx.x % kLanes);
    bool shown = false;
    TileState state = TileState::kFull;
    if (tile < end) {
      const StatesOfTile states = states_of(tile);
      shown = !states.is_hidden();
      state = state_of(states);
    }
    first_ = first;
    shown_ = __ballot_sync(0xffffffffu, shown);
    full_ = __ballot_sync(0xffffffffu, state == TileState::kFull);
    mixed_ = __ballot_sync(0xffffffffu, state == TileState::kMixed);
  }
};

}  // namespace flash_attn_ext::cuda
