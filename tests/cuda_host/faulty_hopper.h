// For faulty.cu: kernels with one fault each in features of Hopper: proxy fences, bulk additions, turns, named barriers.
#pragma once

#include "cuda/shared_memory.h"
#include "cuda/sm90/ptx.h"

namespace faulty_hopper {

namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kThreads = 64;
struct Shared {
  float terms[kThreads];
};
struct Sums {
  alignas(16) float sums[kThreads];
  int32_t ticket, turns;
};
inline Sums global;  // zeros when a kernel begins

__device__ inline float* terms() { return flash_attn_ext::cuda::shared_memory<Shared>().terms; }

struct Steps {
  bool fences = true, fences_late = false, waits = true, overwrites = false, reads_sums = false;
};

__device__ inline void add(const Steps& steps) {
  terms()[threadIdx.x] = threadIdx.x;
  if (steps.fences) ptx::proxy_fence();
  __syncthreads();
  if (steps.fences_late) ptx::proxy_fence();
  if (threadIdx.x == 0) {
    ptx::bulk_add(global.sums, terms(), kThreads);
    ptx::bulk_commit();
    if (steps.waits) ptx::bulk_wait_read();
  }
  __syncthreads();
  if (steps.overwrites) terms()[threadIdx.x] = 0;
  if (steps.reads_sums) terms()[threadIdx.x] = global.sums[threadIdx.x];
}

__global__ void correct_addition(float*) {
  Steps steps;
  steps.overwrites = true;
  add(steps);
}
__global__ void addition_without_proxy_fence(float*) {
  Steps steps;
  steps.fences = false;
  add(steps);
}
__global__ void proxy_fence_after_barrier(float*) {
  Steps steps;
  steps.fences = false;
  steps.fences_late = true;
  add(steps);
}
__global__ void addition_not_waited_for(float*) {
  Steps steps;
  steps.waits = false;
  add(steps);
}
__global__ void addition_source_overwritten(float*) {
  Steps steps;
  steps.waits = false;
  steps.overwrites = true;
  add(steps);
}
__global__ void sums_read_by_a_block_that_adds(float*) {
  Steps steps;
  steps.reads_sums = true;
  add(steps);
}

// Blocks add one after the other: in the order of their begins, or in the order of their numbers.
__device__ inline void add_in_turn(bool waits_for_turn, bool waits_for_addition, bool passes,
                                   bool by_number = false) {
  terms()[threadIdx.x] = threadIdx.x;
  ptx::proxy_fence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int turn = by_number ? static_cast<int>(blockIdx.x) : ptx::draw_ticket(&global.ticket);
  if (waits_for_turn) ptx::acquire_bulk_turn(&global.turns, turn);
  ptx::bulk_add(global.sums, terms(), kThreads);
  ptx::bulk_commit();
  if (waits_for_addition) {
    ptx::bulk_wait();
  } else {
    ptx::bulk_wait_read();
  }
  if (passes) ptx::release_bulk_turn(&global.turns);
}
__global__ void correct_turns(float*) { add_in_turn(true, true, true); }
__global__ void correct_turns_by_number(float*) { add_in_turn(true, true, true, true); }
__global__ void turn_not_waited_for(float*) { add_in_turn(false, true, true); }
__global__ void turn_passed_too_early(float*) { add_in_turn(true, false, true); }
__global__ void turn_not_passed(float*) { add_in_turn(true, true, false); }

// A copy to shared memory. The block may end before the copy has landed, or before the barrier has received all expected
// bytes.
__device__ inline void copy(bool copies, bool waits) {
  constexpr int kCopied = kThreads / 2;
  auto& full = *reinterpret_cast<ptx::Barrier*>(terms() + kCopied);
  if (threadIdx.x != 0) return;
  ptx::barrier_init(full, 1);
  ptx::barrier_init_fence();
  ptx::barrier_arrive_expecting(full, kCopied * sizeof(float));
  if (copies) ptx::load_bytes(terms(), global.sums, kCopied * sizeof(float), full);
  if (waits) ptx::barrier_wait(full, 0);
}
__global__ void correct_copy(float*) { copy(true, true); }
__global__ void copy_not_waited_for(float*) { copy(true, false); }
__global__ void bytes_that_never_come(float*) { copy(false, false); }

__global__ void correct_named_barrier(float* out) {
  const int t = threadIdx.x;
  terms()[t] = t;
  ptx::named_barrier_sync<1, kThreads>();
  out[blockIdx.x * kThreads + t] = terms()[kThreads - 1 - t];
}
__global__ void named_barrier_of_too_many(float* out) {
  ptx::named_barrier_sync<1, kThreads + 32>();
  out[blockIdx.x * kThreads + threadIdx.x] = 0;
}

// Three warpgroups with 168 registers a thread: one returns registers, two request more.
__device__ inline void deal_registers(bool releases) {
  if (threadIdx.x >= 128) {
    ptx::claim_registers<240>();
  } else if (releases) {
    ptx::release_registers<24>();
  }
}
__global__ void correct_registers(float*) { deal_registers(true); }
__global__ void registers_not_released(float*) { deal_registers(false); }
__global__ void registers_claimed_by_a_part(float*) {
  if (threadIdx.x < 64) ptx::release_registers<24>();
}
__global__ void registers_released_to_more(float*) { ptx::release_registers<240>(); }

// A batch of wgmma, which a whole warp must execute together. Lane 7 may leave out an instruction, or execute it elsewhere.
__device__ inline void multiply(bool fences, bool multiplies, bool at_another_line) {
  const bool is_seventh = threadIdx.x % 32 == 7;
  float acc[4] = {};
  constexpr uint64_t kDescriptor = uint64_t{1} << 62;
  if (fences || !is_seventh) ptx::wgmma_fence();
  if (at_another_line && is_seventh) {
    ptx::wgmma_shared<__half>(acc, kDescriptor, kDescriptor, false);
  } else if (multiplies || !is_seventh) {
    ptx::wgmma_shared<__half>(acc, kDescriptor, kDescriptor, false);
  }
  ptx::wgmma_commit();
}
__global__ void wgmma_fence_without_a_lane(float*) { multiply(false, true, false); }
__global__ void wgmma_without_a_lane(float*) { multiply(true, false, false); }
__global__ void wgmma_at_two_places(float*) { multiply(true, true, true); }

}  // namespace faulty_hopper
