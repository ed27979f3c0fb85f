#include "sorted_rounds.h"

#include <algorithm>

#include "../../core/splits.h"

namespace flash_attn_ext::cuda::sm90 {
namespace {

// With fewer rounds, sorting takes longer than persistent blocks save. On an H200 sorting took 10 to 23 us, and from four
// rounds on the sum was 0.94 to 1.96 times as fast as without (benchmarks/results/h200/packed_rounds.txt).
constexpr int64_t kLeastRounds = 4;
// Of a group. More rounds have a better balance. With fewer rounds, the keys and values of a group need less of L2: 8 rounds
// read 69 MB at a head dimension of 128, if heads share nothing.
constexpr int64_t kRoundsOfGroup = 8;

}  // namespace

SortedRounds::SortedRounds(Arena& arena, const AttentionParams& p, int tile_rows) {
  const Sizes& z = p.sizes;
  numbers = static_cast<int32_t*>(p.q.data);
  row_blocks = static_cast<int>(ceil_div(z.seqlen_q, tile_rows));
  blocks = static_cast<int>(most_persistent_blocks());
  // About so many tasks have rows.
  const int64_t tasks = z.heads * (p.varlen ? ceil_div(p.varlen.total_q, tile_rows) : z.batch * row_blocks);
  if (!needs_sorting(p) || tasks < kLeastRounds * blocks) return;

  const int64_t wanted = std::max<int64_t>(tasks / (kRoundsOfGroup * blocks), 1);
  const int64_t wanted_parts = std::clamp<int64_t>(wanted / z.batch, 1, z.heads_kv);
  sequences = static_cast<int>(ceil_div(z.batch, wanted));
  heads = static_cast<int>(ceil_div(z.heads_kv, wanted_parts) * (z.heads / z.heads_kv));
  parts = static_cast<int>(ceil_div(z.heads, heads));
  groups = static_cast<int>(ceil_div(z.batch, sequences) * parts);
  const int64_t items = int64_t{sequences} * row_blocks;
  numbers = arena.take<int32_t>(groups * ceil_div(items * heads, blocks) * blocks);
  count = arena.take<int32_t>(1);
  rows = arena.take<SortedRows>(groups * items);
}

ForwardSchedule SortedRounds::schedule(const Sizes& z, int tile_rows) const {
  Sizes one_more = z;
  one_more.seqlen_q = int64_t{row_blocks + 1} * tile_rows;
  return schedule_forward(one_more, tile_rows, 1);
}

}  // namespace flash_attn_ext::cuda::sm90
