// The kernel that sorts the tasks of task_order.h.
#include "task_order.h"

#include "../launch.h"
#include "../shared_memory.h"
#include "counting_sort.cuh"

namespace flash_attn_ext::cuda::sm90 {
namespace {

// A block sorts a group.
template <class Tasks>
__global__ void __launch_bounds__(CountingSort::kThreads)
    task_order_kernel(const __grid_constant__ Tasks tasks, const TaskGroups groups, int32_t* order) {
  const Range group = groups.group(blockIdx.x);
  const int begin = static_cast<int>(group.begin);
  shared_memory<CountingSort>().longest_first(
      static_cast<int>(group.end - group.begin), tasks.longest(),
      [&](int n) { return tasks.length(begin + n); },
      [&](int n, int, int position) { order[begin + position] = begin + n; });
}

template <class Tasks>
cudaError_t launch_kernel(const Tasks& tasks, int32_t* order, cudaStream_t stream) {
  const TaskGroups groups = tasks.groups();
  const LaunchShape shape{groups.count, 1, 1, CountingSort::kThreads, sizeof(CountingSort)};
  return launch(task_order_kernel<Tasks>, shape, stream, tasks, groups, order);
}

}  // namespace

cudaError_t launch_task_order(const ForwardTasks& tasks, int32_t* order, cudaStream_t stream) {
  return launch_kernel(tasks, order, stream);
}
cudaError_t launch_task_order(const BackwardTasks& tasks, int32_t* order, cudaStream_t stream) {
  return launch_kernel(tasks, order, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
