// The order in which threads draw the tasks of a call.
#pragma once

#include <cstdint>

#include "../core/arena.h"
#include "../core/mask.h"
#include "../core/sequence.h"

namespace flash_attn_ext {

// task_list.cpp compiles these functions once for all kernels.
extern template AttentionParams of_sequence(AttentionParams, int64_t);
extern template BackwardParams of_sequence(BackwardParams, int64_t);
extern template JvpParams of_sequence(JvpParams, int64_t);
extern template DoubleBackwardParams of_sequence(DoubleBackwardParams, int64_t);

}  // namespace flash_attn_ext

namespace flash_attn_ext::cpu {

// A packed call has all tasks of one sequence, then all tasks of the next. Without packing, the batch is one list.
struct TaskList {
  struct Task {
    int64_t b;      // the sequence; 0 without packing
    int64_t index;  // the task's index in the sequence, or in the batch
  };
  struct Sequence {
    int64_t b, first_task;
    double weight;  // estimated work of a task of the sequence
  };

  int64_t total = 0;
  int64_t count = 0;                    // number of sequences
  const Sequence* sequences = nullptr;  // packed: sorted by the order of their tasks

  Task at(int64_t n) const;
  // Returns whether the tasks of all sequences have equal weights.
  bool has_equal_sequences() const {
    return count <= 1 || sequences[0].weight == sequences[count - 1].weight;
  }
};

// Sorts the sequences: the heaviest tasks first, so that the last tasks to run are short. Then replaces the number of
// tasks in `first_task` by the first task. Returns the total.
int64_t order_sequences(TaskList::Sequence* sequences, int64_t count);

// Returns the number of (query, key) pairs inside the band. An estimate.
double visible_pairs(const AttentionParams& p);

// tasks_of(params) returns the number of tasks of one sequence, or of the batch without packing.
template <class Params, class TasksOf>
TaskList list_tasks(Arena& arena, const Params& call, const TasksOf& tasks_of) {
  TaskList list;
  const int64_t batch = call.sizes.batch;
  if (!call.varlen) {
    list.total = tasks_of(call);
    return list;
  }
  TaskList::Sequence* sequences = arena.take<TaskList::Sequence>(batch);
  list.count = batch;
  list.sequences = sequences;
  if (!sequences) return list;  // without memory: only the size of the arena counts
  for (int64_t b = 0; b < batch; ++b) {
    const Params p = of_sequence(call, b);
    const int64_t tasks = tasks_of(p);
    sequences[b] = {b, tasks, tasks == 0 ? 0.0 : visible_pairs(p) / static_cast<double>(tasks)};
  }
  list.total = order_sequences(sequences, batch);
  return list;
}

// The blocks of all heads in one list. The tasks of a few heads are interleaved: the first block of each head, then the
// second block of each head, and so on. Then come the next few heads. Blocks with more work are first, so that the last
// tasks are short and all threads end at nearly the same time.
struct HeadBlocks {
  struct Position {
    int64_t b, h, block;
  };

  int64_t heads;  // per sequence
  int64_t all_heads, blocks, interleaved_heads;

  HeadBlocks(const Sizes& z, int64_t blocks, int64_t interleaved_heads)
      : HeadBlocks(z.batch, z.heads, blocks, interleaved_heads) {}
  HeadBlocks(int64_t batch, int64_t heads, int64_t blocks, int64_t interleaved_heads)
      : heads(heads), all_heads(batch * heads), blocks(blocks), interleaved_heads(interleaved_heads) {}

  Position at(const TaskList::Task& task) const {
    const int64_t n = task.index;
    const int64_t first = n / (interleaved_heads * blocks) * interleaved_heads, rest = n - first * blocks;
    const int64_t beside = interleaved_heads < all_heads - first ? interleaved_heads : all_heads - first;
    const int64_t head = first + rest % beside;
    return {task.b + head / heads, head % heads, rest / beside};
  }
};

}  // namespace flash_attn_ext::cpu
