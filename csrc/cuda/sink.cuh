// The gradient of an attention sink: the sum over a head's rows of P (0 - delta), P = exp(sink - lse). The sink has no
// value, so its column of dP is 0.
#pragma once

#include "lanes.cuh"
#include "launch.h"
#include "scores.cuh"
#include "shared_memory.h"

namespace flash_attn_ext::cuda {

constexpr int kSinkThreads = 256;

// A block owns a head; threads and warps add in a fixed order. Row i of a head is delta[head * delta_rows + i].
template <class T>
__global__ void __launch_bounds__(kSinkThreads)
    sink_gradient_kernel(const BackwardParams p, const T* delta, int64_t delta_rows) {
  constexpr int kWarp = 32;
  T* sums = shared_memory<T[kSinkThreads / kWarp]>();
  const int64_t head = blockIdx.x, b = head / p.sizes.heads, h = head % p.sizes.heads;
  const T sink = p.sink.of<T>(b, h);
  T sum = 0;
  if (sink != -kInf<T>)
    for (int64_t i = threadIdx.x; i < p.sizes.seqlen_q; i += kSinkThreads) {
      const T lse = static_cast<const T*>(p.lse)[p.statistics_row(b, h, i)];
      sum -= std::exp(sink - lse) * delta[head * delta_rows + i];
    }
  sum = total_of_lanes<kWarp>(sum);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();  // every warp's sum is there
  if (threadIdx.x != 0) return;
  T total = 0;
  for (int n = 0; n < kSinkThreads / kWarp; ++n) total += sums[n];
  static_cast<T*>(p.dsink)[head] = total;
}

// Nothing where it is not wanted.
template <class T>
cudaError_t launch_sink_gradient(const BackwardParams& p, const T* delta, int64_t delta_rows,
                                 cudaStream_t stream) {
  const LaunchShape shape{p.dsink ? p.sizes.batch * p.sizes.heads : 0, 1, 1, kSinkThreads,
                          kSinkThreads / 32 * sizeof(T)};
  return launch(sink_gradient_kernel<T>, shape, stream, p, delta, delta_rows);
}

}  // namespace flash_attn_ext::cuda
