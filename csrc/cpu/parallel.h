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

// Calls body(task, thread) for each task in [0, tasks). The tasks are cut into a range for each thread, at most kMostRanges.
// A thread draws the tasks of its range in order, and then of other ranges.
template <int kMostRanges, class Body>
void for_each_task_of_ranges(const Parallel& parallel, int64_t tasks, const Body& body) {
  struct alignas(64) Range {  // a cache line for each counter
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Queue {
    const Body& body;
    const int ranges;
    Range range[kMostRanges];

    Queue(const Body& body, int64_t tasks, int ranges) : body(body), ranges(ranges) {
      for (int n = 0; n < ranges; ++n) {
        range[n].next.store(tasks * n / ranges, std::memory_order_relaxed);
        range[n].end = tasks * (n + 1) / ranges;
      }
    }
  };
  const auto drain = [](void* context, int thread) {
    auto& q = *static_cast<Queue*>(context);
    for (int n = 0; n < q.ranges; ++n) {
      Range& range = q.range[(thread + n) % q.ranges];
      for (int64_t task; (task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;)
        q.body(task, thread);
    }
  };
  const int threads = static_cast<int>(tasks < parallel.threads ? tasks : parallel.threads);
  const int ranges = threads < kMostRanges ? threads : kMostRanges;
  Queue queue(body, tasks, ranges > 1 ? ranges : 1);
  if (threads <= 1) {
    drain(&queue, 0);
  } else {
    parallel.run(threads, drain, &queue);
  }
}

// Calls body(task, thread) for each task in [0, tasks). Threads draw tasks in order from a shared counter, so uneven
// tasks (causal) are balanced. A body writes only the results of its task: results do not depend on the number of
// threads.
template <class Body>
void for_each_task(const Parallel& parallel, int64_t tasks, const Body& body) {
  for_each_task_of_ranges<1>(parallel, tasks, body);
}

// Like for_each_task(), for tasks of equal work. Each thread has a range of tasks, the same in every call. So a repeated
// call finds its keys in the cache of the same core. More than 64 threads share the ranges.
template <class Body>
void for_each_equal_task(const Parallel& parallel, int64_t tasks, const Body& body) {
  for_each_task_of_ranges<64>(parallel, tasks, body);
}

}  // namespace flash_attn_ext::cpu
