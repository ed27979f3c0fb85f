#include "few_rows.h"

#include <algorithm>

#include "../../core/mask.h"
#include "../../core/splits.h"

namespace flash_attn_ext::cuda::sm90 {
namespace {

constexpr int64_t kMultiprocessors = 132;  // of an H100 or H200
constexpr int kMaxHeadsShift = 6;          // a warpgroup's 64 rows are whole queries

// Estimated time. Unit: one query row times one key tile. The constants are estimates, not measured.
int64_t time_of(int64_t blocks, int64_t block_rows, int64_t tiles) {
  constexpr int64_t kAroundTiles = 2;  // the time of a block before its first tile and after its last
  return ceil_div(blocks, kMultiprocessors) * (tiles + kAroundTiles) * block_rows;
}
int64_t time_of_splits(int64_t blocks, int64_t tiles, int64_t splits) {
  constexpr int64_t kMergeTiles = 4;  // the time of another launch and its reads
  return time_of(blocks * splits, kFewRowsTile, ceil_div(tiles, splits)) +
         (splits > 1 ? kMergeTiles * kFewRowsTile : 0);
}

// The columns that a query row computes for a tile of keys. This factor makes the times of kernels with different tiles
// comparable.
constexpr int64_t work_of_key_tile(HeadDims dims) { return int64_t{forward_keys(dims)} * (dims.qk + dims.v); }

// The largest number of key tiles that `queries` neighbouring queries see.
int64_t tiles_of_block(const AttentionParams& p, int64_t queries, int64_t tile_keys) {
  const Sizes& z = p.sizes;
  if (p.varlen) return ceil_div(z.seqlen_k, tile_keys);
  const Range seen = visible_keys(p.band.without_chunks(), 0, z.seqlen_q, z.seqlen_k);
  const int64_t in_band = std::min(queries, z.seqlen_q) + p.band.left + p.band.right;
  return ceil_div(std::max<int64_t>(std::min(seen.end - seen.begin, in_band), 0), tile_keys);
}

// The number of splits: the caller's number, or the fastest number for which the blocks fill the GPU one to four times.
int64_t choose_splits(const AttentionParams& p, int64_t blocks, int64_t tiles) {
  constexpr int64_t kWaves = 4;
  const int64_t most = std::min(tiles, most_splits(p.sizes));
  int64_t best = 1;
  for (int64_t waves = 1; waves <= kWaves && blocks < kMultiprocessors; ++waves) {
    const int64_t splits = std::max<int64_t>(std::min(kMultiprocessors * waves / blocks, most), 1);
    if (time_of_splits(blocks, tiles, splits) < time_of_splits(blocks, tiles, best)) best = splits;
  }
  return split_keys(p, tiles, best).splits;
}

// Fills tiles with rows. `shared`: the heads of a group share tiles.
FewRows fill_tiles(const Sizes& z, bool shared) {
  FewRows few;
  few.group = static_cast<int>(z.heads / z.heads_kv);
  while (shared && few.heads_shift < kMaxHeadsShift && few.tile_heads() < few.group) ++few.heads_shift;
  few.group_tiles = static_cast<int>(ceil_div(few.group, few.tile_heads()));
  return few;
}

size_t partial_bytes(const AttentionParams& p, int splits) {
  return splits == 1 ? 0 : sizeof(float) * Partials<float>::elements(p, splits);
}

}  // namespace

ForwardSchedule schedule_few_rows(const Sizes& z, const FewRows& few_rows) {
  Sizes tiles = z;  // a tile of heads replaces each head
  tiles.heads = z.heads_kv * few_rows.group_tiles;
  return schedule_forward(tiles, few_rows.tile_queries());
}

ForwardChoice choose_forward(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  const HeadDims few_dims = forward_head_dims(z, Form::kFewRows);
  const HeadDims others_dims = forward_head_dims(z, is_plain(p) ? Form::kPlain : Form::kOptions);
  const int64_t keys = forward_keys(few_dims), rows = forward_rows(others_dims);
  const int64_t others_keys = forward_keys(others_dims);
  const auto blocks_of = [&](const FewRows& few) {
    return z.batch * z.heads_kv * few.group_tiles * ceil_div(z.seqlen_q, few.tile_queries());
  };
  // Heads share tiles if this saves at least a tenth of the tiles.
  FewRows few = fill_tiles(z, true), apart = fill_tiles(z, false);
  if (10 * blocks_of(few) > 9 * blocks_of(apart)) few = apart;

  const int64_t tiles = tiles_of_block(p, few.tile_queries(), keys);
  few.splits = static_cast<int>(choose_splits(p, blocks_of(few), tiles));
  few.by_splits = Divider(few.splits);
  const int64_t time = time_of_splits(blocks_of(few), tiles, few.splits) * work_of_key_tile(few_dims);
  const int64_t others_blocks = z.batch * z.heads * ceil_div(z.seqlen_q, rows);
  const int64_t others_time =
      time_of(others_blocks, rows, tiles_of_block(p, rows, others_keys)) * work_of_key_tile(others_dims);
  // With shared tiles K and V are read less often. Without shared tiles, splits must save a ninth of the time, because
  // the loop of the other kernels is shorter.
  const bool is_faster =
      few.heads_shift > 0 ? time <= others_time : few.splits > 1 && 9 * time <= 8 * others_time;
  if (is_faster || (p.decode.num_splits > 1 && few.splits > 1)) return {Form::kFewRows, few_dims, few};
  return {is_plain(p) ? Form::kPlain : Form::kOptions, others_dims, {}};
}

ForwardWorkspace ForwardWorkspace::lay_out(Arena& arena, const AttentionParams& p,
                                           const ForwardChoice& choice) {
  const HeadDims dims = choice.head_dims;
  const int splits = choice.few_rows.splits, keys = forward_keys(dims, choice.form);
  const auto take = [&](size_t bytes) { return arena.take<char>(static_cast<int64_t>(bytes)); };
  ForwardWorkspace w{
      {take(partial_bytes(p, splits)), p, splits}, {take(KeyMask::bytes(p, keys)), p, keys}, {}};
  if (choice.form == Form::kOptions && is_persistent(dims))
    w.sorted = SortedRounds(arena, p, forward_rows(dims, choice.form));
  return w;
}

size_t ForwardWorkspace::bytes(const AttentionParams& p) {
  Arena arena(nullptr);
  lay_out(arena, p, choose_forward(p));
  return arena.used();
}

}  // namespace flash_attn_ext::cuda::sm90
