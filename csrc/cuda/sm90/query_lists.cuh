// The kernels that write the backward's lists.
#pragma once

#include "../../core/mask.h"
#include "../../core/sequence.h"
#include "flex_backward_workspace.h"
#include "write_list.cuh"

namespace flash_attn_ext::cuda::sm90 {

// The tiles of queries and keys of one sequence's call, for one list of the two kernels below.
class BackwardTiles {
 public:
  const BlockOfList of;
  const AttentionParams p;  // of the sequence

  __device__ BackwardTiles(const AttentionParams& call, const simt::DeviceFunctions& functions,
                           const TileLists& lists, int64_t number, int rows, int keys)
      : of(lists, number), p(of_sequence(call, of.b)), functions_(functions), rows_(rows), keys_(keys) {}

  __device__ Range queries(int row_tile) const { return part(row_tile, rows_, p.sizes.seqlen_q); }
  __device__ Range keys(int key_tile) const { return part(key_tile, keys_, p.sizes.seqlen_k); }
  __device__ StatesOfTile states(int row_tile, int key_tile) const {
    const Range i = queries(row_tile), j = keys(key_tile);
    return states_of_tile(p, functions_, of.b, of.h, i.begin, i.end, j.begin, j.end);
  }

 private:
  const simt::DeviceFunctions& functions_;
  const int rows_, keys_;

  static __device__ Range part(int64_t tile, int size, int64_t length) {
    return {tile * size, smaller<int64_t>((tile + 1) * size, length)};
  }
};

// The tiles of `size` that overlap a range; none if the range is empty.
__device__ inline Range tiles_of_range(const Range& range, int size) {
  return range.begin < range.end ? Range{range.begin / size, ceil_div(range.end, size)} : Range{0, 0};
}

// A warp writes the list of one tile of keys.
static __global__ void __launch_bounds__(kTileListThreads)
    query_lists_kernel(const AttentionParams call, const simt::DeviceFunctions* functions,
                       const TileLists lists, const KeyMask key_mask, int rows, int keys) {
  const int64_t number = list_of_warp(lists);
  if (number < 0) return;
  const BackwardTiles tiles(call, *functions, lists, number, rows, keys);
  const BlockOfList& of = tiles.of;
  const Range own = tiles.keys(of.block), attending = key_mask.seen_tiles(of.b, lists.blocks);
  Range seen{0, 0};
  if (own.begin < own.end && attending.begin <= of.block && of.block < attending.end)
    seen = tiles_of_range(
        visible_queries(tiles.p.band.without_chunks(), own.begin, own.end, tiles.p.sizes.seqlen_q), rows);
  write_list(lists.list(number), static_cast<int>(seen.begin), static_cast<int>(seen.end),
             [&](int n) { return tiles.states(n, of.block); });
}

// A warp numbers the tiles of keys that visit one tile of queries: later keys add to dQ first, as turn_of() says. Each
// lane looks up another tile of keys.
static __global__ void __launch_bounds__(kTileListThreads)
    turns_kernel(const AttentionParams call, const simt::DeviceFunctions* functions, const TileLists turns,
                 const KeyMask key_mask, int rows, int keys) {
  const int64_t number = list_of_warp(turns);
  if (number < 0) return;
  const BackwardTiles tiles(call, *functions, turns, number, rows, keys);
  const BlockOfList& of = tiles.of;
  const Range own = tiles.queries(of.block), attending = key_mask.seen_tiles(of.b, turns.tiles);
  if (own.begin >= own.end) return;
  const Range seen = tiles_of_range(
      visible_keys(tiles.p.band.without_chunks(), own.begin, own.end, tiles.p.sizes.seqlen_k), keys);
  const int begin = static_cast<int>(larger(seen.begin, attending.begin)),
            end = static_cast<int>(smaller(seen.end, attending.end)), lane = threadIdx.x % 32;
  int before = 0;
  for (int last = end - 1; last >= begin; last -= 32) {
    const int tile = last - lane;
    const bool visits = tile >= begin && !tiles.states(of.block, tile).is_hidden();
    const uint32_t visitors = __ballot_sync(0xffffffffu, visits);
    if (visits) turns.list(number)[1 + tile] = before + __popc(visitors & ((1u << lane) - 1));
    before += __popc(visitors);
  }
}

}  // namespace flash_attn_ext::cuda::sm90
