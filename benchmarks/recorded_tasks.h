// Included before the kernels' headers, in place of their threads. Runs the tasks of a call one by one, in order, and
// prints one line for each event of a task, with its time. scaling.py reads the lines.
//
//   call           the last call of the program follows; all lines before it are from the warm-up
//   pass SECONDS   tasks begin; SECONDS passed outside of tasks
//   task           the next task begins
//   work SECONDS   the task worked for SECONDS
//   wait COUNTER STEP     the task waits until an earlier task has passed this step
//   next COUNTER STEP     the task works on this step next
//   end SECONDS    SECONDS passed outside of tasks, after the last one
#pragma once

#define for_each_task for_each_task_on_threads
#include "cpu/parallel.h"
#undef for_each_task
#define Turn TurnOfThreads
#include "cpu/turns.h"
#undef Turn

#include <time.h>

#include <cstdio>

namespace flash_attn_ext::cpu {

// Processor time, not wall-clock time: other load on the machine does not count.
inline double seconds_since_last() {
  static double last = 0;
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  const double now = static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec),
               passed = now - last;
  last = now;
  return passed;
}

// Prints an event. The time of printing does not count.
template <class... Values>
inline void record(const char* format, Values... values) {
  std::printf(format, values...);
  seconds_since_last();
}

inline void record_call() { record("call\n"); }

template <class Body>
void for_each_task(const Parallel&, int64_t tasks, const Body& body) {
  record("pass %.9f\n", seconds_since_last());
  for (int64_t n = 0; n < tasks; ++n) {
    record("task\n");
    body(n, 0);
    record("work %.9f\n", seconds_since_last());
  }
}

class Turn {
 public:
  using Counter = TurnOfThreads::Counter;
  static constexpr int64_t kNone = TurnOfThreads::kNone;

  Turn(const Counter* before, Counter* own) : before_(before), own_(own) {}

  void begin(int64_t first) const { record_next(first); }
  void wait_for(int64_t step) const {
    if (!before_) return;
    record("work %.9f\n", seconds_since_last());
    record("wait %p %lld\n", static_cast<const void*>(before_), static_cast<long long>(step));
  }
  void finish(int64_t step, int64_t next) const {
    wait_for(step);
    record_next(next);
  }

 private:
  void record_next(int64_t step) const {
    record("work %.9f\n", seconds_since_last());
    record("next %p %lld\n", static_cast<const void*>(own_), static_cast<long long>(step));
  }

  const Counter* before_;
  Counter* own_;
};

}  // namespace flash_attn_ext::cpu
