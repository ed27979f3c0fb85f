// The numbers of a call's tasks: first those of one sequence of the batch, then those of the next, and so on.
#pragma once

#include <cstdint>

#include "../core/arena.h"
#include "../core/mask.h"
#include "../core/sequence.h"

namespace flash_attn_ext::cpu {

struct TaskList {
  struct Task {
    int64_t b, index;  // index: among the tasks of b
  };
  struct Sequence {
    int64_t b, first_task;
    double weight;  // of one of its tasks
  };

  int64_t total = 0;
  int64_t per_batch = 0;                // without packing, all have as many
  int64_t count = 0;                    // of sequences
  const Sequence* sequences = nullptr;  // packed: in the order of their tasks

  Task at(int64_t n) const;
};

// Puts the sequence with the heaviest tasks first, so that the last tasks to run are short ones; then turns
// the numbers of tasks in `first_task` into first tasks. Returns the total.
int64_t order_sequences(TaskList::Sequence* sequences, int64_t count);

// How many (query, key) pairs the band leaves.
double visible_pairs(const AttentionParams& p);

// tasks_of(params) says how many tasks the call of one sequence has.
template <class Params, class TasksOf>
TaskList plan_tasks(Arena& arena, const Params& call, const TasksOf& tasks_of) {
  TaskList list;
  const int64_t batch = call.sizes.batch;
  if (!call.varlen) {
    list.per_batch = tasks_of(call);
    list.total = batch * list.per_batch;
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

}  // namespace flash_attn_ext::cpu
