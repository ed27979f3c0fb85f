// The tasks of the persistent blocks of the forward, if the host knows the tasks' lengths. If not: sorted_rounds.h.
//
// Round n has the tasks [n * blocks, (n + 1) * blocks) in the order of schedule.h, one for each block. The tasks of a causal
// call have different lengths. So the host adds up the lengths and assigns long tasks to blocks with little work so
// far. A counter in global memory would need no table, but a task number from memory is not a uniform value
// (forward_range.cuh).
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::sm90 {

struct TaskRounds {
  // An H100 or H200 has 132 multiprocessors. With these sizes all arguments of a kernel fit in 4 KB, the limit of older
  // drivers.
  static constexpr int kMaxBlocks = 132, kRows = 16;

  int count = 1;  // of rounds

  // A byte for each block: its task in round n is slot(n, block). Rounds n and n + kRows have the same row. A load of
  // four bytes gives a uniform value; a load of one byte does not.
  uint32_t slots[kRows][kMaxBlocks / 4] = {};

  FA_HOST_DEVICE int slot(int round, int block) const {
    return slots[round % kRows][block / 4] >> block % 4 * 8 & 255;
  }
  void set_slot(int row, int block, uint32_t slot) { slots[row][block / 4] |= slot << block % 4 * 8; }
};

// The number of key tiles for one block of `rows` query rows of a head.
int tiles_of_row_block(const AttentionParams& p, int rows, int keys, int row_block);

// `rows` and `keys` of a tile; `blocks`: at most kMaxBlocks.
TaskRounds deal_tasks(const AttentionParams& p, int rows, int keys, int blocks);

}  // namespace flash_attn_ext::cuda::sm90
