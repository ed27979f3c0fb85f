// Loops with long code over a thread's accumulators of a tensor core product, four elements at a time. Registers can
// only be indexed by constants. So each step works on the first four elements, and then rotates all elements by four.
// After the last step each element is at its first position again.
#pragma once

#include <cuda_runtime.h>

namespace flash_attn_ext::cuda {

// Moves accumulator n + 1 to n, and the first one to the end.
template <int N>
__device__ void rotate(float (&a)[N][4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float first = a[0][e];
#pragma unroll
    for (int n = 0; n + 1 < N; ++n) a[n][e] = a[n + 1][e];
    a[N - 1][e] = first;
  }
}

// Calls f(n, a[n], b[n]) for every n, in a loop that is not unrolled.
template <int N, class F>
__device__ void for_each_accumulator(float (&a)[N][4], float (&b)[N][4], const F& f) {
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
    f(n, a[0], b[0]);
    rotate(a);
    rotate(b);
  }
}
template <int N, class F>
__device__ void for_each_accumulator(float (&a)[N][4], const F& f) {
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
    f(n, a[0]);
    rotate(a);
  }
}

// The elements of a product as groups of four.
template <int kElements>
__device__ auto as_accumulators(float (&x)[kElements]) -> float (&)[kElements / 4][4] {
  return *reinterpret_cast<float (*)[kElements / 4][4]>(&x);
}

}  // namespace flash_attn_ext::cuda
