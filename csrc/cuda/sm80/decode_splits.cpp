#include "decode_splits.h"

#include <algorithm>

#include "../../core/splits.h"
#include "../combine.h"
#include "sm80.h"

namespace flash_attn_ext::cuda::sm80 {
namespace {

// The number of splits for `tasks` tasks. Each task reads `tiles` tiles of keys. With few tasks, one block for each task
// leaves most of a GPU idle. More blocks than fit on the GPU at once leave it half idle at the end. Short splits, and many
// splits of a row, cost more to start and to merge than they save. Measured on an H200 with 4 to 256 splits, head
// dimension 128, 8192 to 131072 keys, 1, 8 and 32 key heads of 32 query heads.
int64_t splits_by_shape(int64_t tiles, int64_t tasks) {
  constexpr int64_t kBlocks = 256;  // two for each multiprocessor of a large GPU
  constexpr int64_t kLeastTiles = 4, kMost = 128;
  return std::min({kBlocks / tasks, tiles / kLeastTiles, kMost});
}

}  // namespace

DecodeSchedule schedule_decode(const AttentionParams& p, int64_t widest_pair) {
  const Sizes& z = p.sizes;
  DecodeSchedule schedule;
  schedule.group = z.heads_kv == 0 ? 0 : z.heads / z.heads_kv;
  const int64_t rows = schedule.group * z.seqlen_q;
  // Blocks of two row tiles read K and V half as often. Their registers suffice up to D 128, but not for packed calls.
  schedule.row_tiles =
      rows > kMmaRows && std::max(z.head_dim, z.head_dim_v) <= widest_pair && !p.varlen ? 2 : 1;
  schedule.row_blocks = ceil_div(rows, kMmaRows * schedule.row_tiles);
  schedule.tasks = z.batch * z.heads_kv * schedule.row_blocks;

  schedule.keys =
      p.varlen ? Range{0, z.seqlen_k} : visible_keys(p.band.without_chunks(), 0, z.seqlen_q, z.seqlen_k);
  schedule.keys.begin = schedule.keys.begin / kWarpKeys * kWarpKeys;
  const int64_t tiles =
      std::max<int64_t>(ceil_div(schedule.keys.end - schedule.keys.begin, kDecodeBlockKeys), 0);
  const KeySplits cut = split_keys(p, tiles, schedule.tasks > 0 ? splits_by_shape(tiles, schedule.tasks) : 1);
  schedule.splits = cut.splits;
  schedule.keys_per_split = cut.tiles_per_split * kDecodeBlockKeys;
  return schedule;
}

size_t decode_workspace(const AttentionParams& p, int64_t widest_pair) {
  const int64_t splits = is_decode(p) ? schedule_decode(p, widest_pair).splits : 1;
  return splits == 1 ? 0 : sizeof(float) * Partials<float>::elements(p, splits);
}

size_t forward_workspace(const AttentionParams& p) { return decode_workspace(p); }

}  // namespace flash_attn_ext::cuda::sm80
