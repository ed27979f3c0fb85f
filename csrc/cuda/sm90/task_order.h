// The order in which the blocks of kernels with functions begin: longest first.
//
// A block mask gives the tasks lists of different lengths (tile_lists.h). The GPU starts blocks in the order of their
// numbers, each on a multiprocessor that is free. If a long task were last, all other multiprocessors would wait for it.
// The lists are in the GPU's memory. So a kernel (task_order.cu) sorts the tasks of each group of heads by the lengths
// of their lists, and a block reads its task. Tasks of the same length keep their order.
#pragma once

#include <cuda_runtime.h>

#include "../device.h"
#include "backward_schedule.h"
#include "tile_lists.h"

namespace flash_attn_ext::cuda::sm90 {

// Groups of tasks. The heads of a group share L2, so a group begins after the group before it. The last group has enough
// tasks for all multiprocessors to end at about the same time.
struct TaskGroups {
  int64_t tasks, of_group, count;

  TaskGroups(int64_t tasks, int64_t of_group) : tasks(tasks), of_group(of_group) {
    const int64_t enough = 4 * multiprocessors(), of_last = of_group > enough ? of_group : enough;
    count = tasks > of_last ? (tasks - of_last) / of_group + 1 : 1;
  }
  FA_HOST_DEVICE Range group(int64_t n) const {
    return {n * of_group, n == count - 1 ? tasks : (n + 1) * of_group};
  }
  // Whether the order matters: not if all blocks begin at once.
  bool are_sorted() const { return tasks > multiprocessors(); }
};

// The tasks of the forward.
struct ForwardTasks {
  ForwardSchedule schedule;
  TileLists lists;

  TaskGroups groups() const {
    return {schedule.tasks, int64_t{schedule.heads_per_group} * schedule.row_blocks};
  }
  FA_HOST_DEVICE int longest() const { return lists.tiles; }
  FA_HOST_DEVICE int length(int number) const {
    const Task task = task_of(schedule, number);
    return lists.list(task.b, task.h, task.row_block)[0];
  }
};

// The tasks of the backward. A task visits the queries of all heads that share its keys.
struct BackwardTasks {
  KeyTileOrder order;
  TileLists lists;
  Sizes sizes;
  int heads_of_kv_head;

  BackwardTasks(const BackwardParams& p, const TileLists& lists)
      : order(p),
        lists(lists),
        sizes(p.sizes),
        heads_of_kv_head(static_cast<int>(p.sizes.heads / p.sizes.heads_kv)) {}

  TaskGroups groups() const {
    const Sizes& z = sizes;
    // q, dout, and the sums of dQ in fp32.
    const int64_t bytes = heads_of_kv_head * z.seqlen_q * (6 * z.head_dim + 2 * z.head_dim_v);
    const int64_t heads = kL2Bytes / bytes > 1 ? kL2Bytes / bytes : 1;
    return {z.batch * z.heads_kv * order.tiles, heads * order.tiles};
  }
  FA_HOST_DEVICE int longest() const { return heads_of_kv_head * lists.tiles; }
  FA_HOST_DEVICE int length(int number) const {
    const KeyTile task = order(number);
    int sum = 0;
    for (int n = 0; n < heads_of_kv_head; ++n)
      sum += lists.list(task.b, task.h_kv * heads_of_kv_head + n, task.tile)[0];
    return sum;
  }
};

// Writes the order: a word for each task.
cudaError_t launch_task_order(const ForwardTasks& tasks, int32_t* order, cudaStream_t stream);
cudaError_t launch_task_order(const BackwardTasks& tasks, int32_t* order, cudaStream_t stream);

// The task of a block. Null: the tasks are not sorted.
__device__ inline int task_of_block(const int32_t* sorted_tasks) {
  return sorted_tasks ? sorted_tasks[blockIdx.x] : static_cast<int>(blockIdx.x);
}

}  // namespace flash_attn_ext::cuda::sm90
