// The kernel that makes the rounds of sorted_rounds.h.
#include "sorted_rounds.h"

#include "../../core/sequence.h"
#include "../launch.h"
#include "../scores.cuh"
#include "../shared_memory.h"
#include "counting_sort.cuh"

namespace flash_attn_ext::cuda::sm90 {

struct RoundsShared {
  CountingSort sort;
  int loads[TaskRounds::kMaxBlocks];     // of the slots
  int last[TaskRounds::kMaxBlocks];      // of the slots: the place of the task of the last round
  int block_of[TaskRounds::kMaxBlocks];  // of the slots
};

struct RoundsArguments {
  SortedRounds to;
  AttentionParams p;
  KeyMask mask;
  int tile_rows, tile_keys;
};

// A group of tasks.
struct SortedGroup {
  int first_sequence, sequences, first_head, heads;

  __device__ SortedGroup(const SortedRounds& rounds, const Sizes& z, int number)
      : first_sequence(number / rounds.parts * rounds.sequences),
        sequences(smaller(rounds.sequences, static_cast<int>(z.batch) - first_sequence)),
        first_head(number % rounds.parts * rounds.heads),
        heads(smaller(rounds.heads, static_cast<int>(z.heads) - first_head)) {}
};

// The number of rounds of a group.
__device__ inline int count_rounds(const RoundsArguments& a, int number) {
  const SortedGroup group(a.to, a.p.sizes, number);
  int64_t tasks = 0;
  for (int n = 0; n < group.sequences; ++n)
    tasks += ceil_div(of_sequence(a.p, group.first_sequence + n).sizes.seqlen_q, a.tile_rows) * group.heads;
  return static_cast<int>(ceil_div(tasks, a.to.blocks));
}

// A block makes the rounds of a group.
__global__ void __launch_bounds__(CountingSort::kThreads)
    make_rounds_kernel(const __grid_constant__ RoundsArguments a) {
  constexpr int kThreads = CountingSort::kThreads;
  auto& shared = shared_memory<RoundsShared>();
  const SortedRounds& to = a.to;
  const SortedGroup group(to, a.p.sizes, blockIdx.x);
  const int blocks = to.blocks, thread = threadIdx.x;
  SortedRows* const rows = to.rows + int64_t{blockIdx.x} * to.sequences * to.row_blocks;

  int rounds_before = 0;
  for (int n = thread; n < static_cast<int>(blockIdx.x); n += kThreads) rounds_before += count_rounds(a, n);
  rounds_before = shared.sort.sum_of_threads(rounds_before).all;

  // A number counts the blocks of rows from the group's first sequence on.
  const auto tiles_of = [&](int number) {
    const int b = group.first_sequence + number / to.row_blocks;
    const int first_row = number % to.row_blocks * a.tile_rows;
    const AttentionParams p = of_sequence(a.p, b);
    if (first_row >= p.sizes.seqlen_q) return -1;
    const Range keys = keys_of_rows(p, first_row, a.tile_rows);
    return tiles_of_keys(a.mask.shown_keys(keys, b, p.sizes.seqlen_k, a.tile_keys), a.tile_keys);
  };
  const int longest = static_cast<int>(ceil_div(a.p.sizes.seqlen_k, a.tile_keys));
  const int tasks =
      group.heads * shared.sort.longest_first(
                        group.sequences * to.row_blocks, longest, tiles_of,
                        [&](int number, int tiles, int position) { rows[position] = {number, tiles}; });
  const int rounds = static_cast<int>(ceil_div(tasks, blocks));
  // The task of a slot; it exists if it is below `tasks`. In the last round the slot with the smallest sum so far has the
  // longest task.
  const auto task_of_slot = [&](int round, int slot) {
    const int place = round == rounds - 1 ? shared.last[slot] : round % 2 ? blocks - 1 - slot : slot;
    return round * blocks + place;
  };
  const auto length_of = [&](int task) {
    return task < tasks ? 1 + rows[task / group.heads].tiles : 0;  // 1: its start and end
  };
  // The number of slots with a larger load, or with the same and a smaller number.
  const auto rank = [&] {
    const int load = shared.loads[thread];
    int before = 0;
    for (int n = 0; n < blocks; ++n)
      before += shared.loads[n] > load || (shared.loads[n] == load && n < thread);
    return before;
  };
  __syncthreads();  // publishes `rows` to the block
  int load = 0;
  if (thread < blocks) {
    for (int round = 0; round < rounds - 1; ++round) load += length_of(task_of_slot(round, thread));
    shared.loads[thread] = load;
  }
  __syncthreads();  // publishes `loads`
  if (thread < blocks) {
    shared.last[thread] = blocks - 1 - rank();
    if (rounds > 0) load += length_of(task_of_slot(rounds - 1, thread));
  }
  __syncthreads();  // all threads have read `loads`
  if (thread < blocks) shared.loads[thread] = load;
  __syncthreads();  // publishes `loads`
  if (thread < blocks) shared.block_of[thread] = blockIdx.x % 2 ? blocks - 1 - rank() : rank();
  __syncthreads();  // publishes `block_of`
  for (int n = thread; n < rounds * blocks; n += kThreads) {
    const int round = n / blocks, slot = n % blocks, task = task_of_slot(round, slot);
    int number = SortedRounds::kNoTask;
    if (task < tasks) {
      const int rows_number = rows[task / group.heads].number;
      const int b = group.first_sequence + rows_number / to.row_blocks;
      const int head = static_cast<int>(a.p.sizes.heads) * b + group.first_head + task % group.heads;
      number = to.task_number(head, rows_number % to.row_blocks);
    }
    to.numbers[int64_t{rounds_before + round} * blocks + shared.block_of[slot]] = number;
  }
  if (blockIdx.x == gridDim.x - 1 && thread == 0) *to.count = rounds_before + rounds;
}

cudaError_t launch_make_rounds(const SortedRounds& rounds, const AttentionParams& p, const KeyMask& mask,
                               int tile_rows, int tile_keys, cudaStream_t stream) {
  const LaunchShape shape{rounds.groups, 1, 1, CountingSort::kThreads, sizeof(RoundsShared)};
  return launch(make_rounds_kernel, shape, stream, RoundsArguments{rounds, p, mask, tile_rows, tile_keys});
}

}  // namespace flash_attn_ext::cuda::sm90
