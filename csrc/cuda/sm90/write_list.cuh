// Writes a list of tile_lists.h, by a warp.
#pragma once

#include "../launch.h"
#include "../shown_tiles.cuh"
#include "tile_lists.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kTileListThreads = 128;

// The list of a warp; -1: none.
__device__ inline int64_t list_of_warp(const TileLists& lists) {
  const int64_t number = int64_t{blockIdx.x} * (kTileListThreads / 32) + threadIdx.x / 32;
  return number < lists.count() ? number : -1;
}
inline LaunchShape shape_of_lists(const TileLists& lists) {
  return {ceil_div(lists.count(), kTileListThreads / 32), 1, 1, kTileListThreads};
}

// A warp lists the tiles in [first, end) that the block mask does not hide. `states_of(tile)`: the StatesOfTile.
template <class StatesOf>
__device__ void write_list(int32_t* list, int first, int end, const StatesOf& states_of) {
  TileSearch search;
  const auto next = [&](int tile) { return search.next(tile, end, states_of); };
  int length = 0;
  for (int tile = next(first); tile < end; tile = next(tile + 1)) {
    ++length;
    if (threadIdx.x % 32 == 0) list[length] = ListedTile(tile, search.state(tile)).word();
  }
  if (threadIdx.x % 32 == 0) list[0] = length;
}

}  // namespace flash_attn_ext::cuda::sm90
