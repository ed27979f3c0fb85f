// The tiles that each block visits, where a block mask or a mask function decides. In the forward a block has query rows
// and visits tiles of keys; in the backward a block has keys and visits tiles of query rows.
#pragma once

#include "../../core/arena.h"
#include "../simt/functions.h"
#include "key_mask.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::sm90 {

// A list for each block of each query head. Heads and batches with the same blocks share lists. An earlier kernel
// (tile_lists.cuh) writes them. So the producer and the consumers of a block read one word for each tile.
struct TileLists {
  int32_t* words = nullptr;  // [batches][heads][blocks][1 + tiles]: the length of a list, then its tiles
  int batches = 0, heads = 0, blocks = 0, tiles = 0;

  TileLists() = default;
  // `blocks`: of a head; `tiles`: of a block without a mask.
  TileLists(Arena& arena, const AttentionParams& p, int64_t blocks, int64_t tiles)
      : blocks(static_cast<int>(blocks)), tiles(static_cast<int>(tiles)) {
    const BlockStates& states = p.functions->blocks;
    // The lengths of packed sequences and masks of keys differ between batches, too.
    batches = static_cast<int>(p.varlen || p.mask || states.stride_b != 0 ? p.sizes.batch : 1);
    heads = static_cast<int>(states.stride_h != 0 ? p.sizes.heads : 1);
    words = arena.take<int32_t>(count() * (1 + tiles));
  }

  FA_HOST_DEVICE int64_t count() const { return int64_t{batches} * heads * blocks; }
  FA_HOST_DEVICE int32_t* list(int64_t number) const { return words + number * (1 + tiles); }
  FA_HOST_DEVICE const int32_t* list(int b, int h, int block) const {
    return list((int64_t{batches > 1 ? b : 0} * heads + (heads > 1 ? h : 0)) * blocks + block);
  }
};

// The block of a list.
struct BlockOfList {
  int b, h, block;

  FA_HOST_DEVICE BlockOfList(const TileLists& lists, int64_t number)
      : b(static_cast<int>(number / lists.blocks / lists.heads)),
        h(static_cast<int>(number / lists.blocks % lists.heads)),
        block(static_cast<int>(number % lists.blocks)) {}
};

struct FlexWorkspace {
  simt::DeviceFunctions* functions;
  int32_t* order;  // the tasks of the blocks: task_order.h
  TileLists lists;
  KeyMask key_mask;

  static FlexWorkspace lay_out(Arena& arena, const AttentionParams& p) {
    const HeadDims dims = forward_head_dims(p.sizes, Form::kFunctions);
    const int keys = forward_keys(dims, Form::kFunctions);
    const int64_t row_blocks = ceil_div(p.sizes.seqlen_q, forward_rows(dims, Form::kFunctions));
    FlexWorkspace w{arena.take<simt::DeviceFunctions>(1),
                    arena.take<int32_t>(p.sizes.batch * p.sizes.heads * row_blocks),
                    TileLists(arena, p, row_blocks, ceil_div(p.sizes.seqlen_k, keys)),
                    {}};
    w.key_mask = KeyMask(arena.take<char>(static_cast<int64_t>(KeyMask::bytes(p, keys))), p, keys);
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::sm90
