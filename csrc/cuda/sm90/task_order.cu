// The kernel that sorts the tasks of task_order.h.
#include "task_order.h"

#include "../launch.h"
#include "../shared_memory.h"

namespace flash_attn_ext::cuda::sm90 {
namespace {

struct SomeLengths {
  static constexpr int kCount = 256;
  int lengths[kCount];
};

// A thread counts the tasks of its group that begin before its own task: they are longer, or as long with a smaller
// number. A group has some thousand tasks at most, so this takes a few microseconds.
template <class Tasks>
__global__ void __launch_bounds__(SomeLengths::kCount)
    task_order_kernel(const __grid_constant__ Tasks tasks, const TaskGroups groups, int32_t* order) {
  constexpr int kCount = SomeLengths::kCount;
  auto& shared = shared_memory<SomeLengths>();
  const Range group = groups.group(blockIdx.x);
  const int64_t own_first = group.begin + int64_t{blockIdx.y} * kCount, own = own_first + threadIdx.x;
  if (own_first >= group.end) return;
  const auto length_of = [&](int64_t task) {
    return task < group.end ? tasks.length(static_cast<int>(task)) : -1;
  };
  const int length = length_of(own);
  int before = 0;
  for (int64_t first = group.begin; first < group.end; first += kCount) {
    if (first > group.begin) __syncthreads();  // all threads have read the lengths of the pass before
    shared.lengths[threadIdx.x] = length_of(first + threadIdx.x);
    __syncthreads();  // publishes the lengths
#pragma unroll 8
    for (int n = 0; n < kCount; ++n)
      before += shared.lengths[n] > length || (shared.lengths[n] == length && first + n < own);
  }
  if (own < group.end) order[group.begin + before] = static_cast<int32_t>(own);
}

template <class Tasks>
cudaError_t launch_kernel(const Tasks& tasks, int32_t* order, cudaStream_t stream) {
  const TaskGroups groups = tasks.groups();
  const Range last = groups.group(groups.count - 1);  // the largest
  const LaunchShape shape{groups.count, ceil_div(last.end - last.begin, SomeLengths::kCount), 1,
                          SomeLengths::kCount, sizeof(SomeLengths)};
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
