// setmaxnreg as the sm90 kernels use it. The producer warpgroup releases registers. Two consumer warpgroups get more
// than the compiler's share, and hold values in them.
#include <csrc/cuda/sm90/ptx.h>

#include "unit.h"

namespace gpu_units {
namespace {

namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // as in the kernels
constexpr int kValues = 200, kRounds = 3, kBlocks = 400;          // more blocks than multiprocessors

__global__ void __launch_bounds__(kThreads, 1) registers_kernel(const int* in, int* out) {
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<kProducerRegisters>();
  } else {
    ptx::claim_registers<kConsumerRegisters>();
    const int t = threadIdx.x - kWarpgroup;
    int x[kValues];
#pragma unroll
    for (int n = 0; n < kValues; ++n) x[n] = in[n * kConsumers * kWarpgroup + t];
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round)
#pragma unroll
      for (int n = 0; n < kValues; ++n) x[n] += x[(n + 1) % kValues];
    int sum = 0;
#pragma unroll
    for (int n = 0; n < kValues; ++n) sum += (n + 1) * x[n];
    out[blockIdx.x * kConsumers * kWarpgroup + t] = sum;
  }
}

std::string claimed_registers() {
  constexpr int kColumns = kConsumers * kWarpgroup;
  std::vector<int> in(kValues * kColumns), expected(kBlocks * kColumns);
  for (size_t n = 0; n < in.size(); ++n) in[n] = n % 101;
  for (int t = 0; t < kColumns; ++t) {
    int x[kValues], sum = 0;
    for (int n = 0; n < kValues; ++n) x[n] = in[n * kColumns + t];
    for (int round = 0; round < kRounds; ++round)
      for (int n = 0; n < kValues; ++n) x[n] += x[(n + 1) % kValues];
    for (int n = 0; n < kValues; ++n) sum += (n + 1) * x[n];
    for (int b = 0; b < kBlocks; ++b) expected[b * kColumns + t] = sum;
  }
  const Buffer<int> from(in), to(expected.size());
  registers_kernel<<<kBlocks, kThreads>>>(from.get(), to.get());
  finish();
  return first_difference(to.values(), expected, kColumns);
}

}  // namespace

std::vector<Unit> registers_units() {
  return {
      {"setmaxnreg: 24 registers for the producer, 240 for two consumers, in 400 blocks", claimed_registers}};
}

}  // namespace gpu_units
