#include "task_rounds.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "../../core/mask.h"

namespace flash_attn_ext::cuda::sm90 {
namespace {

// One number for each slot of a row, or for each block.
using Lengths = std::array<int64_t, TaskRounds::kMaxBlocks>;

// All values on which the table depends.
struct Key {
  Sizes sizes;
  DiagonalBand band;
  int64_t rows, keys, blocks;  // int64_t: no padding between the fields

  bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
};

// The sum of the lengths of all tasks in each slot of each row. A task's length: its tiles, and one more for its start and
// end.
std::array<Lengths, TaskRounds::kRows> add_lengths(const AttentionParams& p, int rows, int keys, int blocks) {
  const ForwardSchedule schedule = schedule_forward(p.sizes, rows);
  std::vector<int64_t> length_of(schedule.row_blocks);
  for (int n = 0; n < schedule.row_blocks; ++n) length_of[n] = 1 + tiles_of_row_block(p, rows, keys, n);
  std::array<Lengths, TaskRounds::kRows> sums = {};
  for (int64_t task = 0; task < schedule.tasks; ++task)
    sums[task / blocks % TaskRounds::kRows][task % blocks] +=
        length_of[task_of(schedule, static_cast<int>(task)).row_block];
  return sums;
}

// Assigns row after row, starting with the rows with the largest differences: the longest task to the block with the
// least work.
TaskRounds deal(const AttentionParams& p, int rows, int keys, int blocks) {
  TaskRounds rounds;
  rounds.count = static_cast<int>(ceil_div(schedule_forward(p.sizes, rows).tasks, blocks));
  if (band_covers(p.band.without_chunks(), 0, p.sizes.seqlen_q, 0,
                  p.sizes.seqlen_k)) {  // all tasks have one length
    for (int row = 0; row < TaskRounds::kRows; ++row)
      for (int block = 0; block < blocks; ++block) rounds.set_slot(row, block, block);
    return rounds;
  }
  const auto sums = add_lengths(p, rows, keys, blocks);
  const auto difference = [&](int row) {
    const auto [least, most] = std::minmax_element(sums[row].begin(), sums[row].begin() + blocks);
    return *most - *least;
  };
  std::array<int, TaskRounds::kRows> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return difference(a) > difference(b); });

  Lengths loads = {};
  std::vector<int> by_load(blocks), by_length(blocks);
  for (const int row : order) {
    std::iota(by_load.begin(), by_load.end(), 0);
    std::iota(by_length.begin(), by_length.end(), 0);
    std::stable_sort(by_load.begin(), by_load.end(), [&](int a, int b) { return loads[a] < loads[b]; });
    std::stable_sort(by_length.begin(), by_length.end(),
                     [&](int a, int b) { return sums[row][a] > sums[row][b]; });
    for (int n = 0; n < blocks; ++n) {
      rounds.set_slot(row, by_load[n], by_length[n]);
      loads[by_load[n]] += sums[row][by_length[n]];
    }
  }
  return rounds;
}

}  // namespace

int tiles_of_row_block(const AttentionParams& p, int rows, int keys, int row_block) {
  return tiles_of_keys(keys_of_rows(p, int64_t{row_block} * rows, rows), keys);
}

// The layers of a model make the same call, so a thread keeps its last table. A new table takes about 50 us.
TaskRounds deal_tasks(const AttentionParams& p, int rows, int keys, int blocks) {
  thread_local Key last_key{};
  thread_local TaskRounds last_rounds;
  const Key key{p.sizes, p.band.without_chunks(), rows, keys, blocks};
  if (!(key == last_key)) {
    last_rounds = deal(p, rows, keys, blocks);
    last_key = key;
  }
  return last_rounds;
}

}  // namespace flash_attn_ext::cuda::sm90
