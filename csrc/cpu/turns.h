// Several tasks add to the same rows, in an order that does not depend on the threads that run them.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <limits>

namespace flash_attn_ext::cpu {

// A task that adds to the rows of a sum in steps. It adds in a step after the previous task has finished this step. All
// tasks have the same order of steps, and each works on some steps. If the previous task does not work on a step, no
// earlier task does. Tasks start in order (parallel.h), so the previous task has started, and waits only for earlier
// tasks. So there is no deadlock.
class Turn {
 public:
  using Counter = std::atomic<int64_t>;  // the next step of its task

  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();  // there are no more steps

  // `before`: the counter of the previous task; null for the first.
  Turn(const Counter* before, Counter* own) : before_(before), own_(own) {}

  void begin(int64_t first) const { own_->store(first, std::memory_order_release); }

  // Waits until all earlier tasks have finished the step: now this task may add to its rows.
  void wait_for(int64_t step) const {
    constexpr int kSpins = 100;  // a tile takes microseconds
    if (!before_) return;
    for (int n = 0; before_->load(std::memory_order_acquire) <= step; ++n)
      if (n > kSpins) sched_yield();  // <thread> takes the compiler 0.13 s in each unit
  }

  // Allows the next task to add in this step, and in all steps before `next`, this task's next step.
  void finish(int64_t step, int64_t next) const {
    wait_for(step);
    own_->store(next, std::memory_order_release);
  }

 private:
  const Counter* before_;
  Counter* own_;
};

}  // namespace flash_attn_ext::cpu
