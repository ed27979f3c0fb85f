// Element types. A kernel widens loaded elements to the accumulator's type, and rounds each result once, when it stores
// it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace flash_attn_ext::cuda {

// The accumulator's type: fp64 for fp64, fp32 for all other types.
template <class In>
using Accumulator = std::conditional_t<std::is_same_v<In, double>, double, float>;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Out, class T>
__device__ inline Out round_to(T x) {
  if constexpr (std::is_same_v<Out, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<Out>(x);
  }
}

}  // namespace flash_attn_ext::cuda
