// The kernel that writes the lists of tile_lists.h.
#pragma once

#include "../../core/mask.h"
#include "../../core/sequence.h"
#include "../shown_tiles.cuh"
#include "tile_lists.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kTileListThreads = 128;

// A warp writes one list: the tiles in the band that neither the block mask nor the key mask hides from all rows.
static __global__ void __launch_bounds__(kTileListThreads)
    tile_lists_kernel(const AttentionParams call, const simt::DeviceFunctions* functions,
                      const TileLists lists, const KeyMask key_mask, int rows, int keys) {
  const int64_t number = int64_t{blockIdx.x} * (kTileListThreads / 32) + threadIdx.x / 32;
  if (number >= lists.count()) return;
  const int row_block = static_cast<int>(number % lists.row_blocks);
  const int64_t head = number / lists.row_blocks, h = head % lists.heads, b = head / lists.heads;
  const AttentionParams p = of_sequence(call, b);
  const int64_t begin_row = int64_t{row_block} * rows,
                end_row = smaller<int64_t>(begin_row + rows, p.sizes.seqlen_q);
  Range seen{0, 0};  // also if a packed sequence ends before these rows
  if (begin_row < end_row) seen = visible_keys(p.band.without_chunks(), begin_row, end_row, p.sizes.seqlen_k);
  const Range attending = key_mask.seen_tiles(static_cast<int>(b), lists.tiles);
  const int first = static_cast<int>(larger(seen.begin / keys, attending.begin));
  const int end = static_cast<int>(smaller(ceil_div(seen.end, keys), attending.end));

  TileSearch search;
  const auto next = [&](int tile) {
    return search.next(tile, end, [&](int n) {
      const int64_t j0 = int64_t{n} * keys, j_end = smaller<int64_t>(j0 + keys, p.sizes.seqlen_k);
      return states_of_tile(p, *functions, b, h, begin_row, end_row, j0, j_end);
    });
  };
  int32_t* const list = lists.list(number);
  int length = 0;
  for (int tile = next(first); tile < end; tile = next(tile + 1)) {
    ++length;
    if (threadIdx.x % 32 == 0) list[length] = ListedTile(tile, search.state(tile)).word();
  }
  if (threadIdx.x % 32 == 0) list[0] = length;
}

}  // namespace flash_attn_ext::cuda::sm90
