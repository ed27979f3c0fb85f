// Threads for the kernels. ops/keys/cpu.cpp passes torch's thread pool, and the C++ tests pass std::thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace flash_attn_ext::cpu {

struct Parallel {
  int threads = 1;
  // Calls worker(context, thread) once for each thread in [0, threads), in any order, and returns when all
  // calls have ended.
  void (*run)(int threads, void (*worker)(void* context, int thread), void* context) = nullptr;
};

// Calls body(task, thread) for each task in [0, tasks). Threads draw tasks in order from a shared counter, so uneven
// tasks (causal) are balanced. A body writes only the results of its task: results do not depend on the number of
// threads.
template <class Body>
void for_each_task(const Parallel& parallel, int64_t tasks, const Body& body) {
  struct Queue {
    const Body& body;
    int64_t tasks;
    std::atomic<int64_t> next;
  } queue{body, tasks, {0}};
  auto drain = [](void* context, int thread) {
    auto& q = *static_cast<Queue*>(context);
    for (int64_t task; (task = q.next.fetch_add(1, std::memory_order_relaxed)) < q.tasks;)
      q.body(task, thread);
  };
  const int threads = static_cast<int>(tasks < parallel.threads ? tasks : parallel.threads);
  if (threads <= 1) {
    drain(&queue, 0);
  } else {
    parallel.run(threads, drain, &queue);
  }
}

}  // namespace flash_attn_ext::cpu
