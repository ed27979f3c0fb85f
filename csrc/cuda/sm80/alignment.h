// Alignment of rows, which the kernels copy in pieces of 16 bytes.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace flash_attn_ext::cuda::sm80 {

// Whether each row of a tensor of 16-bit elements starts at a multiple of 16 bytes and has whole pieces. True for a
// null tensor.
inline bool is_aligned(const Tensor4& t, int64_t columns) {
  constexpr int64_t kBytes = 16, kElements = 8;
  return reinterpret_cast<uintptr_t>(t.data) % kBytes == 0 && t.stride_b % kElements == 0 &&
         t.stride_h % kElements == 0 && t.stride_s % kElements == 0 && columns % kElements == 0;
}

}  // namespace flash_attn_ext::cuda::sm80
