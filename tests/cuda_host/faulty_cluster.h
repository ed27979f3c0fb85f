// For faulty.cu: kernels with one fault each in clusters of two blocks. Each block copies half of a tile into both blocks.
#pragma once

#include "cuda/shared_memory.h"
#include "cuda/sm90/ptx.h"

namespace faulty_cluster {

namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kThreads = 64, kRows = 8, kRowBytes = 128, kBlocks = 2, kRounds = 3;
struct alignas(1024) Shared {
  uint32_t tile[kBlocks][kRows * kRowBytes / 4];  // each block loads one of these halves
  ptx::Barrier full, empty;
};

// Each row of a half has the number of the half in its words.
struct Global {
  alignas(128) uint32_t halves[kBlocks][kRows * kRowBytes / 4];
  CUtensorMap map;
};
inline Global global;

inline void begin() {
  for (int half = 0; half < kBlocks; ++half)
    for (uint32_t& word : global.halves[half]) word = half + 1;
  const cuuint64_t sizes[] = {kRowBytes / 2, kRows, kBlocks}, strides[] = {kRowBytes, kRows * kRowBytes};
  const cuuint32_t box[] = {kRowBytes / 2, kRows, 1}, every[] = {1, 1, 1};
  cuTensorMapEncodeTiled(&global.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, global.halves, sizes, strides, box,
                         every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

struct Steps {
  bool begins_together = true, ends_together = true, waits_for_both = true;
  uint16_t mask = 0b11;
  bool reads_other_memory = false, expects_both = true;
  uint32_t arrives_at = 0;  // added to the rank
};

// The correct steps with one change.
template <class Field, class Value>
__device__ Steps steps_with(Field Steps::* field, Value value) {
  Steps steps;
  steps.*field = static_cast<Field>(value);
  return steps;
}

__device__ inline void exchange(float* out, const Steps& steps) {
  auto& shared = flash_attn_ext::cuda::shared_memory<Shared>();
  const int rank = blockIdx.x % kBlocks, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.full, 1);
    ptx::barrier_init(shared.empty,
                      steps.waits_for_both ? kBlocks : 1);  // the readers of both blocks, or of this one
    ptx::barrier_init_fence();
  }
  if (steps.begins_together)
    ptx::cluster_sync();
  else
    __syncthreads();
  if (threadIdx.x == 0) {
    for (int n = 0; n < kRounds; ++n) {
      ptx::barrier_wait(shared.empty, n % 2 ^ 1);
      ptx::barrier_arrive_expecting(shared.full, sizeof(shared.tile[0]) * (steps.expects_both ? kBlocks : 1));
      ptx::load_box_into_blocks(shared.tile[rank], &global.map, {0, 0, rank}, shared.full, steps.mask);
    }
  } else if (threadIdx.x >= 32) {
    for (int n = 0; n < kRounds; ++n) {
      ptx::barrier_wait(shared.full, n % 2);
      out[blockIdx.x * kThreads + threadIdx.x] =
          static_cast<float>(shared.tile[0][lane] + shared.tile[1][lane]);
      __syncwarp();
      if (!steps.waits_for_both && lane == 0) ptx::barrier_arrive(shared.empty);
      if (steps.waits_for_both && lane < kBlocks)
        ptx::barrier_arrive_in_cluster(shared.empty, lane + steps.arrives_at);
    }
    if (steps.reads_other_memory) out[threadIdx.x] = static_cast<float>(shared.tile[lane == 0 ? 3 : 0][0]);
  }
  __syncwarp();
  if (steps.ends_together) ptx::cluster_sync();
}

__global__ void correct_pair(float* out) { exchange(out, {}); }
__global__ void pair_that_begins_alone(float* out) {
  exchange(out, steps_with(&Steps::begins_together, false));
}
__global__ void pair_that_ends_alone(float* out) { exchange(out, steps_with(&Steps::ends_together, false)); }
__global__ void other_block_not_waited_for(float* out) {
  exchange(out, steps_with(&Steps::waits_for_both, false));
}
__global__ void mask_without_the_other_block(float* out) {
  exchange(out, steps_with(&Steps::mask, 1u << blockIdx.x % kBlocks));
}
__global__ void mask_without_this_block(float* out) {
  exchange(out, steps_with(&Steps::mask, 2u >> blockIdx.x % kBlocks));
}
__global__ void mask_of_too_many_blocks(float* out) { exchange(out, steps_with(&Steps::mask, 0b111)); }
__global__ void bytes_of_one_half_expected(float* out) {
  exchange(out, steps_with(&Steps::expects_both, false));
}
__global__ void arrival_at_no_block(float* out) { exchange(out, steps_with(&Steps::arrives_at, 1)); }
__global__ void memory_of_the_other_block(float* out) {
  exchange(out, steps_with(&Steps::reads_other_memory, true));
}

}  // namespace faulty_cluster
