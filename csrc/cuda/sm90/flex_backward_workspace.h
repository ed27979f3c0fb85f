// The workspace of the backward with functions of the user: the tiles of query rows that each tile of keys visits, and the
// order of the additions to dQ.
#pragma once

#include "backward_schedule.h"
#include "tile_lists.h"

namespace flash_attn_ext::cuda::sm90 {

struct FlexBackwardWorkspace {
  simt::FlexBackwardWorkspace<float>
      simt;  // with a function on scores: row terms, and sums for captured tensors
  simt::DeviceFunctions* functions;
  int32_t* order;  // the tasks of the blocks: task_order.h
  TileLists lists;
  // In a deterministic call, not lists: word 1 + n of row tile m is the turn of key tile n, if the key tile visits m.
  TileLists turns;
  void* others;  // BackwardWorkspace

  static FlexBackwardWorkspace lay_out(Arena& arena, const BackwardParams& p) {
    const int64_t row_tiles = ceil_div(p.sizes.seqlen_q, backward_rows(backward_head_dims(p).qk, false));
    const int64_t key_tiles = ceil_div(p.sizes.seqlen_k, backward_keys(p));
    FlexBackwardWorkspace w{};
    if (p.functions->score) w.simt = simt::FlexBackwardWorkspace<float>::lay_out(arena, p);
    w.functions = p.functions->score ? w.simt.functions : arena.take<simt::DeviceFunctions>(1);
    w.order = arena.take<int32_t>(p.sizes.batch * p.sizes.heads_kv * key_tiles);
    w.lists = TileLists(arena, p, key_tiles, row_tiles);
    if (p.deterministic) w.turns = TileLists(arena, p, row_tiles, key_tiles);
    w.others = arena.take<char>(static_cast<int64_t>(BackwardWorkspace::bytes(p)));
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::sm90
