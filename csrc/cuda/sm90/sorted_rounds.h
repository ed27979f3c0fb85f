// The rounds of persistent blocks, made on the GPU: the host knows neither the lengths of packed sequences nor the keys
// that a mask shows.
//
// A kernel (make_rounds.cu) sorts the tasks of each group, longest first, and drops tasks without rows. It deals them to
// slots: from the first slot to the last, then back. So a slot with a long task gets a short task next. In the last round
// the slot with the smallest sum of tiles gets the longest task. In even groups block 0 has the slot with the largest sum,
// in odd groups the slot with the smallest.
#pragma once

#include <cuda_runtime.h>

#include "../../core/arena.h"
#include "../device.h"
#include "key_mask.h"
#include "schedule.h"
#include "task_rounds.h"

namespace flash_attn_ext::cuda::sm90 {

// The number of persistent blocks, if there are enough tasks.
inline int64_t most_persistent_blocks() {
  const int64_t all = multiprocessors();
  return all < TaskRounds::kMaxBlocks ? all : TaskRounds::kMaxBlocks;
}

// A block of rows of a group's sequences, and the number of key tiles that it sees.
struct SortedRows {
  int32_t number, tiles;
};

// A group has some heads of one sequence, or all heads of some sequences.
struct SortedRounds {
  // Whether only the GPU knows the lengths of the tasks.
  static bool needs_sorting(const AttentionParams& p) { return p.varlen || p.mask; }

  int groups = 0;                // 0: the tasks are not sorted
  int sequences = 0, heads = 0;  // of a group
  int parts = 0;                 // groups that share their sequences
  int row_blocks = 0;            // of the longest sequence
  int blocks = 0;                // persistent blocks
  int32_t* numbers =
      nullptr;               // [rounds][blocks] the task of each block: task_number(). Not sorted: any memory
  int32_t* count = nullptr;  // of rounds
  SortedRows* rows = nullptr;  // [groups][sequences * row_blocks]

  SortedRounds() = default;
  SortedRounds(Arena& arena, const AttentionParams& p, int tile_rows);

  FA_HOST_DEVICE explicit operator bool() const { return groups > 0; }

  // The order of the tasks' numbers. Each head has a first block of rows after all of its rows. So task 0 has no rows: a
  // block without a task in a round has this task.
  ForwardSchedule schedule(const Sizes& z, int tile_rows) const;
  static constexpr int kNoTask = 0;
  FA_HOST_DEVICE int task_number(int head, int row_block) const {
    return head * (row_blocks + 1) + row_blocks - row_block;
  }
};

// Makes the rounds after the kernel that writes `mask`. `tile_rows`, `tile_keys`: of a tile.
cudaError_t launch_make_rounds(const SortedRounds& rounds, const AttentionParams& p, const KeyMask& mask,
                               int tile_rows, int tile_keys, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::sm90
