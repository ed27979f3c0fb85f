// The limits of shared memory. The host reads them, too, so this header has no functions of the GPU.
#pragma once

#include <cstddef>

namespace flash_attn_ext::cuda {

// The most shared memory that a block may have: on compute capability 7.5; on every GPU from 8.0 on; on 8.0, 8.7 and
// data centre GPUs from 9.0 on; on Hopper.
constexpr size_t kTuringSharedBytes = 64 << 10, kMaxSharedBytes = 99 << 10;
constexpr size_t kLargeSharedBytes = 163 << 10, kMaxHopperSharedBytes = 227 << 10;
// The shared memory that CUDA takes from a multiprocessor for each block, in addition.
constexpr size_t kReservedSharedBytes = 1 << 10;

}  // namespace flash_attn_ext::cuda
