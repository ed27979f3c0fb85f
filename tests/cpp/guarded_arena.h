// Included before every source of the sanitizer builds (g++ -include), in place of csrc/core/arena.h. This Arena has
// a poisoned red zone before each array and poisons its padding. AddressSanitizer then reports an access past the end
// of an array.
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
      ASAN_UNPOISON_MEMORY_REGION(base_ + begin, end - begin);  // red zones of an earlier arena
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
