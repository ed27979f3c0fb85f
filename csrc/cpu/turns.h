// Threads that add to the same rows, in an order that does not depend on them.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>

namespace flash_attn_ext::cpu {

// One of those who add to the rows of a sum: it follows the one before it. Tasks are drawn in order (parallel.h), so
// whoever is waited for has begun, and waits for nobody behind it: nothing can lock up.
class Turn {
 public:
  using Counter =
      std::atomic<int64_t>;  // rows, from row 0 on, that its owner and all before it have finished

  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  // `before`: the counter of the one before; null for the first.
  Turn(const Counter* before, Counter* own) : before_(before), own_(own) {}

  // Returns when all before this one have finished the rows below `end`: they may be added to.
  void wait_for_rows(int64_t end) const {
    constexpr int kSpins = 100;  // a tile takes microseconds
    if (!before_) return;
    for (int n = 0; before_->load(std::memory_order_acquire) < end; ++n)
      if (n > kSpins) std::this_thread::yield();
  }

  // Hands the rows below `end` on.
  void finish_rows(int64_t end) const {
    wait_for_rows(end);
    own_->store(end, std::memory_order_release);
  }

 private:
  const Counter* before_;
  Counter* own_;
};

}  // namespace flash_attn_ext::cpu
