// Kernels with one fault each. tests/cuda/test_cuda_host.py checks that the host run reports each fault.
#include <string>

#include "capture.h"
#include "cuda/launch.h"
#include "cuda/ptx.h"
#include "cuda/shared_memory.h"
#include "faulty_cluster.h"
#include "faulty_hopper.h"
#include "fibers.h"
#include "memory.h"

namespace {

using flash_attn_ext::cuda::LaunchShape;

constexpr int kThreads = 64;
struct Shared {
  float value[kThreads];
};

__device__ Shared& shared() { return flash_attn_ext::cuda::shared_memory<Shared>(); }

// Sums neighbours correctly. The other kernels are variations of this kernel.
__global__ void correct(float* out) {
  const int t = threadIdx.x;
  shared().value[t] = t;
  __syncthreads();
  out[blockIdx.x * kThreads + t] = shared().value[t] + shared().value[kThreads - 1 - t];
}

__global__ void missing_barrier_after_write(float* out) {
  const int t = threadIdx.x;
  shared().value[t] = t;
  out[blockIdx.x * kThreads + t] = shared().value[kThreads - 1 - t];
}

__global__ void missing_barrier_before_overwrite(float* out) {
  const int t = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    shared().value[t] = t;
    __syncthreads();
    out[blockIdx.x * kThreads + t] = shared().value[kThreads - 1 - t];
  }
}

__global__ void warp_barrier_between_warps(float* out) {
  const int t = threadIdx.x;
  shared().value[t] = t;
  __syncwarp();
  out[blockIdx.x * kThreads + t] = shared().value[kThreads - 1 - t];
}

__global__ void shuffle_taken_for_a_barrier(float* out) {
  const int t = threadIdx.x;
  shared().value[t] = t;
  const float other = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  out[blockIdx.x * kThreads + t] = shared().value[t ^ 1] + other;
}

__global__ void unwritten_shared_memory(float* out) { out[threadIdx.x] = shared().value[threadIdx.x]; }

__global__ void shared_memory_out_of_bounds(float* out) {
  shared().value[threadIdx.x + 1] = 0;
  out[threadIdx.x] = 0;
}

__global__ void write_out_of_bounds(float* out) { out[blockIdx.x * kThreads + threadIdx.x + 1] = 0; }

__global__ void read_out_of_bounds(float* out) { out[threadIdx.x] = out[-1]; }

__global__ void blocks_write_the_same(float* out) { out[threadIdx.x] = 0; }

__global__ void divergent_barrier(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[blockIdx.x * kThreads + threadIdx.x] = 0;
}

__global__ void barrier_not_reached_by_all(float* out) {
  if (threadIdx.x == 7) return;
  __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = 0;
}

__device__ void async_copy(float* out, bool waits, bool meets) {
  constexpr int kPerThread = 4;
  const int t = threadIdx.x;
  out[blockIdx.x * kThreads + t] = t;
  __syncthreads();
  if (t < kThreads / kPerThread)
    flash_attn_ext::cuda::ptx::cp_async_16(&shared().value[kPerThread * t],
                                           out + blockIdx.x * kThreads + kPerThread * t, true);
  flash_attn_ext::cuda::ptx::cp_async_commit();
  if (waits) flash_attn_ext::cuda::ptx::cp_async_wait<0>();
  if (meets) __syncthreads();
  out[blockIdx.x * kThreads + t] = shared().value[kThreads - 1 - t];
}
__global__ void correct_async_copy(float* out) { async_copy(out, true, true); }
__global__ void async_copy_without_wait(float* out) { async_copy(out, false, true); }
__global__ void async_copy_without_barrier(float* out) { async_copy(out, true, false); }
__global__ void async_copy_at_the_end(float* out) {
  out[blockIdx.x * kThreads + threadIdx.x] = 0;
  __syncthreads();
  flash_attn_ext::cuda::ptx::cp_async_4(&shared().value[threadIdx.x],
                                        out + blockIdx.x * kThreads + threadIdx.x, true);
  flash_attn_ext::cuda::ptx::cp_async_commit();
}

// Threads add to an element that thread 0 has written.
__device__ void atomic_adds(float* out, bool writes, bool meets, bool reads) {
  float* const sum = out + blockIdx.x * kThreads;
  if (writes && threadIdx.x == 0) *sum = 0;
  if (meets) __syncthreads();
  atomicAdd(sum, 1.0f);
  if (reads && *sum > kThreads) out[blockIdx.x * kThreads + threadIdx.x] = *sum;
}
__global__ void correct_atomic_adds(float* out) { atomic_adds(out, true, true, false); }
__global__ void atomic_adds_to_unwritten_memory(float* out) { atomic_adds(out, false, true, false); }
__global__ void atomic_adds_without_barrier(float* out) { atomic_adds(out, true, false, false); }
__global__ void atomic_adds_and_plain_reads(float* out) { atomic_adds(out, true, true, true); }

__global__ void lane_outside_of_its_mask(float* out) {
  out[blockIdx.x * kThreads + threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1);
}
__global__ void shuffle_from_outside_of_the_mask(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[blockIdx.x * kThreads + threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 16);
}
__global__ void masks_that_differ(float*) {
  __syncwarp(threadIdx.x % 32 < 16 ? 0xffffffffu : 0xfffffffeu);  // each lane is in its own mask
}

__global__ void misaligned(float* out) { *reinterpret_cast<double*>(out + 1) = 0; }

const struct {
  const char* name;
  void (*kernel)(float*);
  int threads = kThreads;
  int blocks = 2;
  int cluster = 1;
  size_t shared_bytes = sizeof(Shared);
} kKernels[] = {
    {"correct", correct},
    {"missing_barrier_after_write", missing_barrier_after_write},
    {"missing_barrier_before_overwrite", missing_barrier_before_overwrite},
    {"warp_barrier_between_warps", warp_barrier_between_warps},
    {"shuffle_taken_for_a_barrier", shuffle_taken_for_a_barrier},
    {"unwritten_shared_memory", unwritten_shared_memory},
    {"shared_memory_out_of_bounds", shared_memory_out_of_bounds},
    {"write_out_of_bounds", write_out_of_bounds},
    {"read_out_of_bounds", read_out_of_bounds},
    {"blocks_write_the_same", blocks_write_the_same},
    {"divergent_barrier", divergent_barrier},
    {"barrier_not_reached_by_all", barrier_not_reached_by_all},
    {"misaligned", misaligned},
    {"correct_atomic_adds", correct_atomic_adds},
    {"atomic_adds_to_unwritten_memory", atomic_adds_to_unwritten_memory},
    {"atomic_adds_without_barrier", atomic_adds_without_barrier},
    {"atomic_adds_and_plain_reads", atomic_adds_and_plain_reads},
    {"correct_async_copy", correct_async_copy},
    {"async_copy_without_wait", async_copy_without_wait},
    {"async_copy_without_barrier", async_copy_without_barrier},
    {"async_copy_at_the_end", async_copy_at_the_end},
#define FA_HOPPER(name) {#name, faulty_hopper::name}
    {"lane_outside_of_its_mask", lane_outside_of_its_mask},
    {"shuffle_from_outside_of_the_mask", shuffle_from_outside_of_the_mask},
    {"masks_that_differ", masks_that_differ},
    FA_HOPPER(correct_addition),
    FA_HOPPER(addition_without_proxy_fence),
    FA_HOPPER(proxy_fence_after_barrier),
    FA_HOPPER(addition_not_waited_for),
    FA_HOPPER(addition_source_overwritten),
    FA_HOPPER(sums_read_by_a_block_that_adds),
    FA_HOPPER(correct_turns),
    FA_HOPPER(correct_turns_by_number),
    {"turn_of_a_block_that_cannot_begin", faulty_hopper::correct_turns_by_number, kThreads, 32},
    FA_HOPPER(turn_not_waited_for),
    FA_HOPPER(turn_passed_too_early),
    FA_HOPPER(turn_not_passed),
    FA_HOPPER(correct_copy),
    FA_HOPPER(copy_not_waited_for),
    FA_HOPPER(bytes_that_never_come),
    FA_HOPPER(correct_named_barrier),
    FA_HOPPER(named_barrier_of_too_many),
#define FA_WARPGROUPS(name) {#name, faulty_hopper::name, 3 * 128}
    FA_WARPGROUPS(correct_registers),
    FA_WARPGROUPS(registers_not_released),
    FA_WARPGROUPS(registers_claimed_by_a_part),
    FA_WARPGROUPS(registers_released_to_more),
    FA_WARPGROUPS(wgmma_fence_without_a_lane),
    FA_WARPGROUPS(wgmma_without_a_lane),
    FA_WARPGROUPS(wgmma_at_two_places),
#undef FA_WARPGROUPS
#define FA_CLUSTER(name) \
  {#name, faulty_cluster::name, faulty_cluster::kThreads, 2, 2, sizeof(faulty_cluster::Shared)}
    FA_CLUSTER(correct_pair),
    FA_CLUSTER(pair_that_begins_alone),
    FA_CLUSTER(pair_that_ends_alone),
    FA_CLUSTER(other_block_not_waited_for),
    FA_CLUSTER(mask_without_the_other_block),
    FA_CLUSTER(mask_without_this_block),
    FA_CLUSTER(mask_of_too_many_blocks),
    FA_CLUSTER(bytes_of_one_half_expected),
    FA_CLUSTER(arrival_at_no_block),
    FA_CLUSTER(memory_of_the_other_block),
#undef FA_CLUSTER
#undef FA_HOPPER
};

std::string report;

// Launchers. Two of them cannot be captured in a CUDA graph.
int number = 0;  // in the GPU's memory: a graph's inputs change before it runs

__global__ void write_number(float* out, const int* from) { out[threadIdx.x] = *from; }
__global__ void write_value(float* out, int value) { out[threadIdx.x] = value; }

const LaunchShape kOneBlock{1, 1, 1, kThreads};
cudaError_t correct_launch(float* out) {
  return flash_attn_ext::cuda::launch(write_number, kOneBlock, nullptr, out, &number);
}
cudaError_t host_reads_an_input(float* out) {
  return flash_attn_ext::cuda::launch(write_value, kOneBlock, nullptr, out, number);
}
cudaError_t pointer_to_the_hosts_stack(float* out) {
  const int local = number;
  return flash_attn_ext::cuda::launch(write_number, kOneBlock, nullptr, out, &local);
}

const struct {
  const char* name;
  cudaError_t (*launcher)(float*);
} kLaunchers[] = {
    {"correct_launch", correct_launch},
    {"host_reads_an_input", host_reads_an_input},
    {"pointer_to_the_hosts_stack", pointer_to_the_hosts_stack},
};

}  // namespace

// Captures the named launcher, changes its input, and replays. Returns the report, or an empty text.
extern "C" const char* rehearse_faulty(const char* name) {
  alignas(16) static float out[kThreads];
  cuda_host::forget_buffers();
  cuda_host::register_buffer(out, sizeof(out), sizeof(float), "out", true, false);
  cuda_host::register_buffer(&number, sizeof(number), sizeof(number), "number", false, true);
  for (const auto& entry : kLaunchers)
    if (entry.name == std::string(name)) {
      number = 1;
      begin_capture();
      entry.launcher(out);
      end_capture();
      number = 2;
      cuda_host::replay();
      report = cuda_host::take_error();
      if (report.empty() && out[0] != 2) report = "the replay used an old input";
      return report.c_str();
    }
  return "no such launcher";
}

// Runs some blocks of the named kernel. Returns the report, or an empty text.
extern "C" const char* run_faulty(const char* name, uint64_t seed) {
  alignas(16) static float out[2 * kThreads];
  cuda_host::seed_order(seed);
  cuda_host::forget_buffers();
  cuda_host::register_buffer(out, sizeof(out), sizeof(float), "out", true, false);
  faulty_hopper::global = {};
  faulty_cluster::begin();
  cuda_host::register_buffer(&faulty_cluster::global, sizeof(faulty_cluster::global), sizeof(float), "halves",
                             false, true);
  cuda_host::register_buffer(&faulty_hopper::global, sizeof(faulty_hopper::global), sizeof(float), "sums",
                             true, true);
  for (const auto& entry : kKernels)
    if (entry.name == std::string(name)) {
      const LaunchShape shape{entry.blocks, 1, 1, entry.threads, entry.shared_bytes, entry.cluster};
      flash_attn_ext::cuda::launch(entry.kernel, shape, nullptr, &out[0]);
      report = cuda_host::take_error();
      return report.c_str();
    }
  return "no such kernel";
}
