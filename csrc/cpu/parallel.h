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

// Like for_each_task(), for tasks of equal work. Each thread has a range of tasks, the same in every call. Then it draws from
// the ranges of other threads. So a repeated call finds its keys in the cache of the same core.
template <class Body>
void for_each_equal_task(const Parallel& parallel, int64_t tasks, const Body& body) {
  constexpr int kMostRanges = 64;  // more threads share them
  struct alignas(64) Range {       // a cache line for each counter
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Queue {
    const Body& body;
    int ranges;
    Range range[kMostRanges];
  };
  const int threads = static_cast<int>(tasks < parallel.threads ? tasks : parallel.threads);
  if (threads <= 1) return for_each_task(parallel, tasks, body);
  Queue queue{body, threads < kMostRanges ? threads : kMostRanges, {}};
  for (int n = 0; n < queue.ranges; ++n) {
    queue.range[n].next = tasks * n / queue.ranges;
    queue.range[n].end = tasks * (n + 1) / queue.ranges;
  }
  parallel.run(
      threads,
      [](void* context, int thread) {
        auto& q = *static_cast<Queue*>(context);
        for (int n = 0; n < q.ranges; ++n) {
          Range& range = q.range[(thread + n) % q.ranges];
          for (int64_t task; (task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;)
            q.body(task, thread);
        }
      },
      &queue);
}

}  // namespace flash_attn_ext::cpu
