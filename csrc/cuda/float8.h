// float8_e4m3fn: one sign bit, four bits of exponent, three of fraction. The largest number is 448; there is a NaN, and no Inf.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace flash_attn_ext::cuda {

struct Float8 {
  uint8_t bits;
};

__device__ inline float widen(Float8 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  // The bits of a float, with an exponent that is off by the difference of the formats' biases.
  const float value = magnitude == 0x7f ? NAN : __uint_as_float(magnitude << 20) * 0x1p120f;
  return x.bits & 0x80u ? -value : value;
}

// Whether one of four adjacent numbers is NaN.
__device__ inline bool has_nan(uint32_t four) {
  return (((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080) != 0;
}

}  // namespace flash_attn_ext::cuda
