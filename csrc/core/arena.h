// A layout of scratch memory. The code that uses the memory runs its layout twice. A null base gives the size, then
// real memory gives the pointers.
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

}  // namespace flash_attn_ext
