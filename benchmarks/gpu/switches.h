// Tensors and times for the two programs of switches.py.
#pragma once

#include <csrc/core/params.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace switches {

using flash_attn_ext::Tensor4;

constexpr int64_t kTokens = 16384, kColumns = 2048, kElements = kTokens * kColumns;  // as in problem.py
constexpr int kMostTensors = 8;
constexpr int64_t kShift = 12347;  // between the values of two tensors, so that the tensors differ

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::puts(cudaGetErrorString(status));
  std::exit(1);
}

// Bytes on the GPU.
inline void* allocate(size_t bytes) {
  void* data;
  check(cudaMalloc(&data, bytes));
  return data;
}

// Values of bfloat16 of either sign, for all tensors of all problems. `exponent`: 0x3f00 for values around 1, 0x3e00 for
// values around 1 / 4.
inline std::vector<uint16_t> random_values(uint16_t exponent) {
  std::vector<uint16_t> values(kElements + (kMostTensors - 1) * kShift);
  uint64_t state = 1;
  for (uint16_t& value : values) {
    state = state * 6364136223846793005 + 1442695040888963407;
    value = static_cast<uint16_t>(state >> 63 << 15 | exponent | (state >> 48 & 0xff));
  }
  return values;
}

// The n-th tensor of a problem, (B, H, S, D).
inline Tensor4 make_tensor(const std::vector<uint16_t>& values, int n, int64_t heads, int64_t length,
                           int64_t head_dim) {
  void* const data = allocate(kElements * 2);
  check(cudaMemcpy(data, values.data() + n * kShift, kElements * 2, cudaMemcpyHostToDevice));
  return {data, heads * length * head_dim, length * head_dim, head_dim};
}

inline std::vector<uint16_t> values_of(const Tensor4& t) {
  std::vector<uint16_t> values(kElements);
  check(cudaMemcpy(values.data(), t.data, kElements * 2, cudaMemcpyDeviceToHost));
  return values;
}

// Returns the microseconds of one launch, after three launches without a time.
template <class Launch>
float microseconds_of(int repeats, const Launch& launch) {
  constexpr int kWarmUp = 3;
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  for (int repeat = 0; repeat < kWarmUp + repeats; ++repeat) {
    if (repeat == kWarmUp) check(cudaEventRecord(start));
    check(launch());
  }
  check(cudaEventRecord(stop));
  check(cudaEventSynchronize(stop));
  float milliseconds;
  check(cudaEventElapsedTime(&milliseconds, start, stop));
  return milliseconds * 1000.0f / static_cast<float>(repeats);
}

}  // namespace switches
