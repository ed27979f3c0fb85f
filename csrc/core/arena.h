// A layout of scratch memory. The code that uses the memory runs its layout twice: with a null base to compute the size,
// then with real memory to get the pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_attn_ext {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    char* here = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(here);
  }

  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// The scratch memory of each thread, as a part of a workspace.
class ThreadScratch {
 public:
  // lay_out(Arena&) is the layout of one thread's memory.
  template <class LayOut>
  static ThreadScratch allocate(Arena& arena, int threads, const LayOut& lay_out) {
    Arena one(nullptr);
    lay_out(one);
    ThreadScratch scratch;
    scratch.bytes_ = one.used();
    scratch.base_ = arena.take<char>(static_cast<int64_t>(scratch.bytes_) * threads);
    return scratch;
  }

  Arena of_thread(int thread) const { return Arena(base_ + thread * bytes_); }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace flash_attn_ext
