// Gradients of the elements that a score function captures: tables, slopes, temperatures.
//
// Many elements of the score matrix add to one captured element, from many blocks. Sums of floating-point numbers depend on
// their order; sums of integers do not. So two loops run over the tiles:
//
//   1. largest[n] = max |x|, over all contributions x to element n
//   2. sums[n] += round(x / unit_n), where unit_n = 2^(exponent of largest[n] + 1 + log2_count - 62): no sum overflows
//
// An element's gradient is sums[n] * unit_n. All runs have the same bits. The rounding error of a contribution is at
// most 2^-(61 - log2_count) of the largest contribution.
#pragma once

#include <cmath>
#include <cstring>

#include "../launch.h"
#include "../scores.cuh"
#include "functions.h"

namespace flash_attn_ext::cuda::simt {

// Bits in `sums` if the largest contribution is infinite.
constexpr unsigned long long kHasInfinity = 1, kHasMinusInfinity = 2;

// x = scaled * 2^-shift, with |scaled| < 2^(62 - log2_count).
__device__ inline int captured_shift(double largest, int log2_count) {
  return 61 - log2_count - std::ilogb(largest);
}

// Adds a contribution to element n. Programs call it (program.cuh).
__device__ inline void add_captured(const CapturedSums& to, int64_t n, double x) {
  if (to.pass == CapturedSums::kFindLargest) {
    const double magnitude = std::abs(x);  // magnitudes are ordered like their bits, with NaN above infinity
    unsigned long long bits;
    memcpy(&bits, &magnitude, sizeof bits);
    atomicMax(to.largest + n, bits);
    return;
  }
  double bound;
  memcpy(&bound, to.largest + n, sizeof bound);
  if (bound == 0 || std::isnan(bound)) return;
  if (std::isinf(bound)) {
    if (std::isinf(x)) atomicOr(to.sums + n, x > 0 ? kHasInfinity : kHasMinusInfinity);
    return;
  }
  const long long scaled = std::llrint(std::ldexp(x, captured_shift(bound, to.log2_count)));
  atomicAdd(to.sums + n, static_cast<unsigned long long>(scaled));  // of two's complement
}

static __global__ void __launch_bounds__(kThreads)
    clear_captured_kernel(const CapturedSums to, int64_t count) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n < count) to.largest[n] = to.sums[n] = 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    store_captured_kernel(const CapturedSums from, T* gradient, int64_t count) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= count) return;
  double bound, total;
  memcpy(&bound, from.largest + n, sizeof bound);
  if (std::isinf(bound)) {
    const bool is_positive = from.sums[n] == kHasInfinity, is_negative = from.sums[n] == kHasMinusInfinity;
    total = is_positive ? kInf<double> : is_negative ? -kInf<double> : NAN;
  } else {
    total = bound == 0 || std::isnan(bound)
                ? bound
                : std::ldexp(static_cast<double>(static_cast<long long>(from.sums[n])),
                             -captured_shift(bound, from.log2_count));
  }
  gradient[n] = static_cast<T>(total);
}

inline LaunchShape one_thread_each(int64_t elements) {
  return {ceil_div(elements, kThreads), 1, 1, kThreads};
}

// Before the first loop.
inline cudaError_t launch_clear_captured(const CapturedSums& sums, int64_t count, cudaStream_t stream) {
  return launch(clear_captured_kernel, one_thread_each(count), stream, sums, count);
}

// After the second loop.
template <class T>
cudaError_t launch_store_captured(const CapturedSums& sums, const UserFunctions& functions,
                                  cudaStream_t stream) {
  return launch(store_captured_kernel<T>, one_thread_each(functions.captured_count), stream, sums,
                static_cast<T*>(functions.dcaptured), functions.captured_count);
}

}  // namespace flash_attn_ext::cuda::simt
