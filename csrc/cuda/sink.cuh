// The gradient of an attention sink: the sum over a head's rows of P (0 - delta), P = exp(sink - lse). The sink has no
// value, so its column of dP is 0.
#pragma once

#include "../core/sequence.h"
#include "lanes.cuh"
#include "launch.h"
#include "scores.cuh"
#include "shared_memory.h"

namespace flash_attn_ext::cuda {

constexpr int kSinkThreads = 256;

// The index of row i of head h in delta, as in lse. A tier with another layout of delta passes another class.
struct RowOfLse {
  __device__ int64_t operator()(const AttentionParams& p, int64_t b, int64_t h, int64_t i) const {
    return p.lse_index(b, h, i);
  }
};

// A block computes one head. Threads and warps add in a fixed order.
template <class T, class RowOfDelta>
__global__ void __launch_bounds__(kSinkThreads, 1)
    sink_gradient_kernel(const BackwardParams call, const T* delta, const RowOfDelta row_of_delta) {
  constexpr int kWarp = 32;
  T* sums = shared_memory<T[kSinkThreads / kWarp]>();
  const int64_t head = blockIdx.x, b = head / call.sizes.heads, h = head % call.sizes.heads;
  const BackwardParams p = of_sequence(call, b);
  const T sink = p.sink.of<T>(b, h);
  T sum = 0;
  if (sink != -kInf<T>)
    for (int64_t i = threadIdx.x; i < p.sizes.seqlen_q; i += kSinkThreads) {
      const T lse = static_cast<const T*>(p.lse)[p.lse_index(b, h, i)];
      sum -= std::exp(sink - lse) * delta[row_of_delta(p, b, h, i)];
    }
  sum = total_of_lanes<kWarp>(sum);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();  // protects the warps' sums: thread 0 reads them after this
  if (threadIdx.x != 0) return;
  T total = 0;
  for (int n = 0; n < kSinkThreads / kWarp; ++n) total += sums[n];
  static_cast<T*>(p.dsink)[head] = total;
}

// Does nothing if the gradient is not wanted.
template <class T, class RowOfDelta>
cudaError_t launch_sink_gradient(const BackwardParams& p, const T* delta, const RowOfDelta& row_of_delta,
                                 cudaStream_t stream) {
  const LaunchShape shape{p.dsink ? p.sizes.batch * p.sizes.heads : 0, 1, 1, kSinkThreads,
                          kSinkThreads / 32 * sizeof(T)};
  return launch(sink_gradient_kernel<T, RowOfDelta>, shape, stream, p, delta, row_of_delta);
}

}  // namespace flash_attn_ext::cuda
