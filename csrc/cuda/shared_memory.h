// A block's dynamic shared memory, with a struct as its layout.
#pragma once

#include <cuda_runtime.h>

#include "ptx.h"
#include "shared_bytes.h"

namespace flash_attn_ext::cuda {

extern __shared__ __align__(1024) unsigned char shared_bytes[];

template <class Shared, size_t kMaxBytes = kMaxSharedBytes>
__device__ Shared& shared_memory() {
  static_assert(sizeof(Shared) <= kMaxBytes && alignof(Shared) <= 1024);
  // TMA and wgmma swizzle by the address. With a base that is not aligned, results would be wrong without a message.
  if (ptx::opaque_shared_address(shared_bytes) % alignof(Shared) != 0) __trap();
  return *reinterpret_cast<Shared*>(ptx::shared_of_block(shared_bytes));
}

}  // namespace flash_attn_ext::cuda
