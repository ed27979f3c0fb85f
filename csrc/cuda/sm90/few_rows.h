// Calls of few query rows. The heads that share a key head fill tiles together, as in FlashAttention-3's PackGQA
// (Shah et al. 2024), so that K and V are read once for all of them. Where the blocks do not fill the GPU, the keys
// are split over more of them (Flash-Decoding, Dao et al. 2023), and combine.cu merges.
#pragma once

#include "../combine.h"
#include "key_mask.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kFewRowsTile = 128;  // query rows of a tile, whatever the head dimension

// How query rows fill tiles, and into how many pieces the keys of a tile are cut. Row n of a tile is query
// n >> heads_shift of head n % 2^heads_shift: a power of two, so that no row needs a division. Where a group has
// fewer heads, TMA brings zeros for the others.
struct FewRows {
  int heads_shift = 0;
  int group = 1;        // query heads of a key head
  int group_tiles = 1;  // tiles that have all of them
  int splits = 1;
  Divider by_splits;

  int tile_heads() const { return 1 << heads_shift; }
  FA_HOST_DEVICE int tile_queries() const { return kFewRowsTile >> heads_shift; }
};

// The rows of a tile from `first_row` on. Those exist whose query lies before end_query and whose head before end_head.
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

// Which of the forward's kernels runs a call, and how it cuts it.
struct ForwardChoice {
  Form form;
  HeadDims head_dims;
  FewRows few_rows;
};

// From shape and band alone, so that results do not depend on the machine; and from the splits that the caller asks for.
ForwardChoice choose_forward(const AttentionParams& p);

ForwardSchedule schedule_few_rows(const Sizes& z, const FewRows& few_rows);

// The results of splits, and the mask's bits.
struct ForwardWorkspace {
  Partials<float> partials;
  KeyMask key_mask;

  // `keys`: of a tile.
  ForwardWorkspace(void* memory, const AttentionParams& p, int splits, int keys);
  static size_t bytes(const AttentionParams& p);
};

}  // namespace flash_attn_ext::cuda::sm90
