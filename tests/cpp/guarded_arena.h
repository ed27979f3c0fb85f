// Put in front of every source of the sanitizer builds (g++ -include), in place of csrc/core/arena.h: the same
// Arena with a red zone before each array and none of its rounding up left readable behind it, so that
// AddressSanitizer sees one array of the workspace run into the next.
#pragma once

#define Arena UnguardedArena
#include "core/arena.h"
#undef Arena

#include <sanitizer/asan_interface.h>

namespace flash_attn_ext {

class Arena {
 public:
  static constexpr size_t kAlignment = UnguardedArena::kAlignment;

  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const size_t begin = used_ + kAlignment, end = begin + static_cast<size_t>(count) * sizeof(T);
    const size_t next = (end + kAlignment - 1) / kAlignment * kAlignment;
    if (base_) {
      ASAN_UNPOISON_MEMORY_REGION(base_ + begin, end - begin);  // of an arena that was here before
      ASAN_POISON_MEMORY_REGION(base_ + used_, begin - used_);
      ASAN_POISON_MEMORY_REGION(base_ + end, next - end);
    }
    used_ = next;
    return base_ ? reinterpret_cast<T*>(base_ + begin) : nullptr;
  }

  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace flash_attn_ext
