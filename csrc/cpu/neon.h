// The NEON intrinsics under the names that vec/ uses, for isa_neon.cpp and isa_neon_bf16.cpp.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define FA_VECTOR_BYTES 16
#define FA_VECTOR_REGISTERS 32
#define FA_MULTIPLIES_BY_LANE  // a multiply-add may broadcast one lane of a register
#define FA_MUL_EPU32(a, b) vmull_u32(vmovn_u64((uint64x2_t)(a)), vmovn_u64((uint64x2_t)(b)))
#define FA_MAX_PS(a, b) (Vec<float>)vmaxnmq_f32((float32x4_t)(a), (float32x4_t)(b))
#define FA_MAX_PD(a, b) (Vec<double>)vmaxnmq_f64((float64x2_t)(a), (float64x2_t)(b))
#define FA_WIDEN_BYTES(x) (U32) flash_attn_ext::cpu::widen_4_bytes((uint32_t)(x))
#define FA_WIDEN_SIGNED_BYTES(x) (VecIndex<float>)flash_attn_ext::cpu::widen_4_signed_bytes((uint32_t)(x))
#define FA_HAS_F16C
#define FA_BITS_OF_64_BYTES(p) flash_attn_ext::cpu::bits_of_64_bytes(p)
#define FA_CVTPH_PS(x) (F32) vcvt_f32_f16((float16x4_t)(x))
#define FA_CVTPS_PH(x) (Half16) vcvt_f16_f32((float32x4_t)(x))

// Compiled for the baseline, and static, so that the linker cannot use these functions in other object files.
namespace flash_attn_ext::cpu {

static inline uint32x4_t widen_4_bytes(uint32_t x) {
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(x)))));
}

static inline int32x4_t widen_4_signed_bytes(uint32_t x) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(x)))));
}

// Returns bits: bit n is p[n] != 0.
static inline uint64_t bits_of_64_bytes(const uint8_t* p) {
  const uint8x16_t bit_of_lane = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  uint8x16_t bits[4];
  for (int n = 0; n < 4; ++n) {
    const uint8x16_t bytes = vld1q_u8(p + 16 * n);
    bits[n] = vandq_u8(vtstq_u8(bytes, bytes), bit_of_lane);
  }
  // Sums of neighbours, three times: 8 bits become one byte.
  const uint8x16_t sums = vpaddq_u8(vpaddq_u8(bits[0], bits[1]), vpaddq_u8(bits[2], bits[3]));
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
}

}  // namespace flash_attn_ext::cpu
