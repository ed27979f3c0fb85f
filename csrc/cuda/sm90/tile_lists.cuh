// The kernel that writes the forward's lists.
#pragma once

#include "../../core/mask.h"
#include "../../core/sequence.h"
#include "write_list.cuh"

namespace flash_attn_ext::cuda::sm90 {

// A warp writes one list: the tiles in the band that neither the block mask nor the key mask hides from all rows.
static __global__ void __launch_bounds__(kTileListThreads)
    tile_lists_kernel(const AttentionParams call, const simt::DeviceFunctions* functions,
                      const TileLists lists, const KeyMask key_mask, int rows, int keys) {
  const int64_t number = list_of_warp(lists);
  if (number < 0) return;
  const auto [b, h, block] = BlockOfList(lists, number);
  const AttentionParams p = of_sequence(call, b);
  const int64_t begin_row = int64_t{block} * rows,
                end_row = smaller<int64_t>(begin_row + rows, p.sizes.seqlen_q);
  Range seen{0, 0};  // also if a packed sequence ends before these rows
  if (begin_row < end_row) seen = visible_keys(p.band.without_chunks(), begin_row, end_row, p.sizes.seqlen_k);
  const Range attending = key_mask.seen_tiles(b, lists.tiles);
  const int first = static_cast<int>(larger(seen.begin / keys, attending.begin));
  const int end = static_cast<int>(smaller(ceil_div(seen.end, keys), attending.end));
  write_list(lists.list(number), first, end, [&](int n) {
    const int64_t j0 = int64_t{n} * keys, j_end = smaller<int64_t>(j0 + keys, p.sizes.seqlen_k);
    return states_of_tile(p, *functions, b, h, begin_row, end_row, j0, j_end);
  });
}

}  // namespace flash_attn_ext::cuda::sm90
