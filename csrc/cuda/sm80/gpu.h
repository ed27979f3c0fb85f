// The GPUs of a kernel with mma.sync: a trait of the kernel's config. All GPUs have the same kernel sources.
#pragma once

#include <cstddef>

#include "../shared_bytes.h"

namespace flash_attn_ext::cuda::sm80 {

#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__;
#else
constexpr int kCompiledFor = 0;  // the host: for every GPU
#endif

// kHasCode: whether this run of the compiler generates the kernel's code. Otherwise the kernel traps, and the selector
// does not choose it.

// Compute capability 8.0 and later.
struct Ampere {
  static constexpr bool kHasCode = kCompiledFor == 0 || kCompiledFor >= 800;
  static constexpr bool kAsyncCopies = true;
  static constexpr size_t kSharedBytes = kMaxSharedBytes;
  static constexpr int kWidestPair =
      128;  // head dimension up to which registers hold two row tiles of decoding
};

// GPUs with 163 KB of shared memory: compute capability 8.0, 8.7, 9.0 and 10.0.
struct LargeAmpere : Ampere {
  static constexpr size_t kSharedBytes = kLargeSharedBytes;
};

// Compute capability 7.5. It has no cp.async, so rows are copied through registers. Its mma.sync has a left operand of
// 8 columns, so ptx.h makes two instructions of each product.
struct Turing {
  static constexpr bool kHasCode = kCompiledFor == 0 || (kCompiledFor >= 750 && kCompiledFor < 800);
  static constexpr bool kAsyncCopies = false;
  static constexpr size_t kSharedBytes = kTuringSharedBytes;
  static constexpr int kWidestPair = 64;
};

}  // namespace flash_attn_ext::cuda::sm80
