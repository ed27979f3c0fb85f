// The mask function of the user in the registers of the forward's consumers.
#pragma once

#include "forward_range.cuh"
#include "hidden_by_functions.cuh"
#include "softmax.cuh"
#include "task_order.h"
#include "tile_lists.h"

namespace flash_attn_ext::cuda::sm90 {

// The arguments of a kernel with functions.
struct FlexArguments : ForwardArguments {
  TileLists lists;
  const simt::DeviceFunctions* functions;
  const int32_t* sorted_tasks;  // task_order.h; null: tasks are not sorted

  __device__ int task_of_block() const { return sm90::task_of_block(sorted_tasks); }
  __device__ HiddenByFunctions hidden() const { return {functions}; }

  // Which elements of the thread's rows, in tile n, the key mask and the functions show. A full tile does not run the
  // mask function. Other tiles run it where the band and the key mask show an element. This happens before the products
  // of the tile, when no product owns registers: so the call of the interpreter spills nothing.
  // kInBand: not outside the band, either.
  template <int kKeys, bool kInBand = false>
  __device__ RowBits shown_elements(const BlockRange& range, int n, const int (&query)[2]) const {
    const ListedTile tile(range.list[1 + n]);
    const uint32_t keys = key_mask.columns(range.b, tile.number, threadIdx.x);
    RowBits bits{{keys, keys}};
    const bool is_full = tile.state == TileState::kFull;
    if (is_full && !kInBand) return bits;
    const int first_key = tile.number * kKeys + first_column_in_eight();
    const ShortBand& band = range.band;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int end = query[r] < band.seqlen_q ? min(band.end(query[r]) - first_key, kKeys) : 0;
      uint32_t shown = keys & columns_between(band.begin(query[r]) - first_key, end);
#pragma unroll 1
      for (uint32_t open = is_full ? 0 : shown; open != 0; open &= open - 1) {
        const int bit = __ffs(open) - 1;
        const simt::ProgramPoint<float> at{range.b, range.h, query[r], first_key + bit / 2 * 8 + bit % 2,
                                           0,       0};
        if (!shows_element(functions, tile.state, at)) shown ^= 1u << bit;
      }
      bits.rows[r] = shown;
    }
    return bits;
  }
};

template <>
struct ArgumentsOf<Form::kFunctions> {
  using Type = FlexArguments;
};

}  // namespace flash_attn_ext::cuda::sm90
