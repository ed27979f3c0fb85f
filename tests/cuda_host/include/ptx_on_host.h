// csrc/cuda/ptx.h for a run on the host: the same functions, which instructions.cpp defines.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace cuda_host {

void cp_async_16(void* shared, const void* global, bool inside);
void cp_async_4(void* shared, const void* global, bool inside);
void cp_async_commit();
void cp_async_wait(int pending);
void ldmatrix_x4(Site site, uint32_t* r, const void* row, bool transposed);
void mma_m16n8k16(Site site, float* c, const uint32_t* a, uint32_t b0, uint32_t b1,
                  float (*widen)(uint16_t bits));
int draw_ticket(int* ticket);
int add_atomically(int* number, int x);
int acquire_number(Site site, const int* number);
void acquire_turn(Site site, const int* turns, int turn);
void release_turn(int* turns);
uint32_t shared_address(const void* pointer);
uint32_t opaque_shared_address(const void* pointer);
unsigned char* shared_of_block(unsigned char* bytes);  // of the block that runs
float exp2_fast(float x);
float log2_fast(float x);

template <class In>
float widen_bits(uint16_t bits) {
  In x;
  std::memcpy(&x, &bits, sizeof(x));
  if constexpr (std::is_same_v<In, __half>)
    return __half2float(x);
  else
    return __bfloat162float(x);
}

}  // namespace cuda_host

namespace flash_attn_ext::cuda::ptx {

using cuda_host::cp_async_16;
using cuda_host::cp_async_4;
using cuda_host::cp_async_commit;
using cuda_host::draw_ticket;
using cuda_host::exp2_fast;
using cuda_host::log2_fast;
using cuda_host::opaque_shared_address;
using cuda_host::release_turn;
using cuda_host::shared_address;
using cuda_host::shared_of_block;

inline void acquire_turn(const int* turns, int turn, CUDA_HOST_SITE) {
  cuda_host::acquire_turn({"acquire_turn", file, line}, turns, turn);
}

inline uint32_t bit_mask(uint32_t first, uint32_t count) {
  const uint64_t bits = count < 32 ? (uint64_t{1} << count) - 1 : ~uint32_t{0};
  return first < 32 ? static_cast<uint32_t>(bits << first) : 0;
}
inline float reciprocal_fast(float x) {
  const float y = 1 / x;
  return std::abs(y) < std::numeric_limits<float>::min() ? 0 : y;  // NaN stays
}
inline int uniform(int x, CUDA_HOST_SITE) {
  return cuda_host::take_from_lane({"uniform", file, line}, 0xffffffffu, x, 0);
}

template <int kPending>
void cp_async_wait() {
  cuda_host::cp_async_wait(kPending);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, CUDA_HOST_SITE) {
  cuda_host::ldmatrix_x4({"ldmatrix", file, line}, r, row, false);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, CUDA_HOST_SITE) {
  cuda_host::ldmatrix_x4({"ldmatrix.trans", file, line}, r, row, true);
}

template <class In>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CUDA_HOST_SITE) {
  cuda_host::mma_m16n8k16({"mma", file, line}, c, a, b0, b1, cuda_host::widen_bits<In>);
}

template <class In>
uint32_t pack(float first, float second) {
  In pair[2];
  if constexpr (std::is_same_v<In, __half>) {
    pair[0] = __float2half_rn(first), pair[1] = __float2half_rn(second);
  } else {
    pair[0] = __float2bfloat16_rn(first), pair[1] = __float2bfloat16_rn(second);
  }
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return bits;
}

}  // namespace flash_attn_ext::cuda::ptx
