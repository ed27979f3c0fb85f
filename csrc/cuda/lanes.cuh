// Maximum and sum over neighbouring lanes of a warp. All of these lanes receive the result. `kLanes` is a power of two.
#pragma once

#include "scores.cuh"

namespace flash_attn_ext::cuda {

// The number of lanes that share a row of an accumulator, for mma.sync and wgmma.
constexpr int kRowLanes = 4;

template <int kLanes, class T>
__device__ T maximum_of_lanes(T x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

template <int kLanes, class T>
__device__ T total_of_lanes(T x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

}  // namespace flash_attn_ext::cuda
