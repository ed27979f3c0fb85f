// Calls of few query rows. The heads that share a key head fill tiles together, as in FlashAttention-3's PackGQA (Shah
// et al. 2024), so that K and V are read once for all of them. If the blocks do not fill the GPU, the keys are split
// over more blocks (Flash-Decoding, Dao et al. 2023), and combine.cu merges.
#pragma once

#include "../combine.h"
#include "key_mask.h"
#include "schedule.h"
#include "sorted_rounds.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kFewRowsTile = 128;  // query rows of a tile, for every head dimension

// The rows of tiles, and the splits of the keys. Row n of a tile is query n >> heads_shift of head n %
// 2^heads_shift. The power of two avoids a division for each row. If a group has fewer heads, TMA writes zeros.
struct FewRows {
  int heads_shift = 0;
  int group = 1;        // query heads of a key head
  int group_tiles = 1;  // tiles that hold all heads of a group
  int splits = 1;
  Divider by_splits;

  int tile_heads() const { return 1 << heads_shift; }
  FA_HOST_DEVICE int tile_queries() const { return kFewRowsTile >> heads_shift; }
};

// The rows of a tile from `first_row` on. A row exists if its query is below end_query and its head below end_head.
struct TileRows {
  int heads_shift, first_query, end_query, first_head, end_head, first_row = 0;

  FA_HOST_DEVICE int query(int n) const { return first_query + ((first_row + n) >> heads_shift); }
  FA_HOST_DEVICE int head(int n) const { return first_head + ((first_row + n) & ((1 << heads_shift) - 1)); }
  FA_HOST_DEVICE bool has(int n) const { return query(n) < end_query && head(n) < end_head; }
  FA_HOST_DEVICE TileRows from(int row) const {
    TileRows rows = *this;
    rows.first_row += row;
    return rows;
  }
};

// The forward kernel of a call, and the blocks of the call.
struct ForwardChoice {
  Form form;
  HeadDims head_dims;
  FewRows few_rows;
};

// Chooses by shape, band and the caller's splits alone, so that results do not depend on the machine.
ForwardChoice choose_forward(const AttentionParams& p);

ForwardSchedule schedule_few_rows(const Sizes& z, const FewRows& few_rows);

// The results of splits, the mask's bits, and the tasks of persistent blocks.
struct ForwardWorkspace {
  Partials<float> partials;  // first, for launch_combine()
  KeyMask key_mask;
  SortedRounds sorted;

  static ForwardWorkspace lay_out(Arena& arena, const AttentionParams& p, const ForwardChoice& choice);
  static size_t bytes(const AttentionParams& p);
};

}  // namespace flash_attn_ext::cuda::sm90
