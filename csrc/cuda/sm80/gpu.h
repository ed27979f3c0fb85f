// The GPUs that a kernel of mma.sync is for: a trait of the kernel's config. The text of the kernels is the same for all.
#pragma once

#include <cstddef>

#include "../shared_memory.h"

namespace flash_attn_ext::cuda::sm80 {

#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__;
#else
constexpr int kCompiledFor = 0;  // the host: for every GPU
#endif

// kHasCode: whether this pass of the compiler makes the kernel. Otherwise it traps; the selector sends no calls there.

// Compute capability 8.0 and later.
struct Ampere {
  static constexpr bool kHasCode = kCompiledFor == 0 || kCompiledFor >= 800;
  static constexpr bool kAsyncCopies = true;
  static constexpr size_t kSharedBytes = kMaxSharedBytes;
  static constexpr int kWidestPair =
      128;  // head dimension up to which registers hold two row tiles of decoding
};

// Compute capability 7.5. It has no cp.async: rows go through registers. An mma.sync has 8 columns of its left operand, so
// ptx.h makes two of each product.
struct Turing {
  static constexpr bool kHasCode = kCompiledFor == 0 || (kCompiledFor >= 750 && kCompiledFor < 800);
  static constexpr bool kAsyncCopies = false;
  static constexpr size_t kSharedBytes = kTuringSharedBytes;
  static constexpr int kWidestPair = 64;
};

}  // namespace flash_attn_ext::cuda::sm80
