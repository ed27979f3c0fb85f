#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace flash_attn_ext {

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
