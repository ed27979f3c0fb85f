// The numbers of a call's tasks, in the order in which threads draw them.
#pragma once

#include <cstdint>

#include "../core/arena.h"
#include "../core/mask.h"
#include "../core/sequence.h"

namespace flash_attn_ext::cpu {

// Packed, first come all tasks of one sequence, then those of the next. Without packing, the batch is one list.
struct TaskList {
  struct Task {
    int64_t b;      // the sequence; 0 without packing
    int64_t index;  // among its tasks, or among those of the batch
  };
  struct Sequence {
    int64_t b, first_task;
    double weight;  // of one of its tasks
  };

  int64_t total = 0;
  int64_t count = 0;                    // of sequences
  const Sequence* sequences = nullptr;  // packed: in the order of their tasks

  Task at(int64_t n) const;
};

// Puts the sequence with the heaviest tasks first, so that the last tasks to run are short ones; then turns
// the numbers of tasks in `first_task` into first tasks. Returns the total.
int64_t order_sequences(TaskList::Sequence* sequences, int64_t count);

// How many (query, key) pairs the band leaves.
double visible_pairs(const AttentionParams& p);

// tasks_of(params) says how many tasks the call of one sequence has, or that of the batch without packing.
template <class Params, class TasksOf>
TaskList plan_tasks(Arena& arena, const Params& call, const TasksOf& tasks_of) {
  TaskList list;
  const int64_t batch = call.sizes.batch;
  if (!call.varlen) {
    list.total = tasks_of(call);
    return list;
  }
  TaskList::Sequence* sequences = arena.take<TaskList::Sequence>(batch);
  list.count = batch;
  list.sequences = sequences;
  if (!sequences) return list;  // a plan without memory: only its size counts
  for (int64_t b = 0; b < batch; ++b) {
    const Params p = of_sequence(call, b);
    const int64_t tasks = tasks_of(p);
    sequences[b] = {b, tasks, tasks == 0 ? 0.0 : visible_pairs(p) / static_cast<double>(tasks)};
  }
  list.total = order_sequences(sequences, batch);
  return list;
}

// The blocks of the heads of one list. A few heads run side by side: the first block of each of them, then the second
// of each, and so on; then the next few. The last tasks to run decide how evenly threads end, so that blocks with more
// work come first.
struct HeadBlocks {
  struct Place {
    int64_t b, h, block;
  };

  int64_t heads;  // of a sequence
  int64_t all_heads, blocks, side_by_side;

  HeadBlocks(const Sizes& z, int64_t blocks, int64_t side_by_side)
      : heads(z.heads), all_heads(z.batch * z.heads), blocks(blocks), side_by_side(side_by_side) {}

  Place at(const TaskList::Task& task) const {
    const int64_t n = task.index;
    const int64_t first = n / (side_by_side * blocks) * side_by_side, rest = n - first * blocks;
    const int64_t beside = side_by_side < all_heads - first ? side_by_side : all_heads - first;
    const int64_t head = first + rest % beside;
    return {task.b + head / heads, head % heads, rest / beside};
  }
};

}  // namespace flash_attn_ext::cpu
