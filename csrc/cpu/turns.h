// Several tasks add to the same rows, in an order that does not depend on which threads run them.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>

namespace flash_attn_ext::cpu {

// One task that adds to the rows of a sum, after the task before it. Tasks start in order (parallel.h): the task that it
// waits for has started, and waits for earlier tasks only, so there is no deadlock.
class Turn {
 public:
  using Counter = std::atomic<int64_t>;  // rows, from row 0 on, that its task and all before it have finished

  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  // `before`: the counter of the task before; null for the first.
  Turn(const Counter* before, Counter* own) : before_(before), own_(own) {}

  // Returns when all tasks before this one have finished the rows below `end`: this one may add to them.
  void wait_for_rows(int64_t end) const {
    constexpr int kSpins = 100;  // a tile takes microseconds
    if (!before_) return;
    for (int n = 0; before_->load(std::memory_order_acquire) < end; ++n)
      if (n > kSpins) std::this_thread::yield();
  }

  // Lets the next task add to the rows below `end`.
  void finish_rows(int64_t end) const {
    wait_for_rows(end);
    own_->store(end, std::memory_order_release);
  }

 private:
  const Counter* before_;
  Counter* own_;
};

}  // namespace flash_attn_ext::cpu
