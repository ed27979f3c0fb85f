// Several tasks add to the same rows, in an order that does not depend on which threads run them.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>

namespace flash_attn_ext::cpu {

// One task that adds to the rows of a sum, in steps, after the task before it. Each task goes through the steps in the
// same order and works on some of them. Where the task before does not work on a step, no task before that one does.
// Tasks start in order (parallel.h): the task that it waits for has started, and waits for earlier tasks only, so there
// is no deadlock.
class Turn {
 public:
  using Counter = std::atomic<int64_t>;  // the step that its task works on next

  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();  // it has no steps left

  // `before`: the counter of the task before; null for the first.
  Turn(const Counter* before, Counter* own) : before_(before), own_(own) {}

  void begin(int64_t first) const { own_->store(first, std::memory_order_release); }

  // Returns when all tasks before this one have finished the step: this one may add to its rows.
  void wait_for(int64_t step) const {
    constexpr int kSpins = 100;  // a tile takes microseconds
    if (!before_) return;
    for (int n = 0; before_->load(std::memory_order_acquire) <= step; ++n)
      if (n > kSpins) std::this_thread::yield();
  }

  // Lets the next task add to the rows of this step, and of those up to the one that this task works on next.
  void finish(int64_t step, int64_t next) const {
    wait_for(step);
    own_->store(next, std::memory_order_release);
  }

 private:
  const Counter* before_;
  Counter* own_;
};

}  // namespace flash_attn_ext::cpu
