// NEON with its bfloat16 dot product (FEAT_BF16: Neoverse V1 and N2, Apple M2 onwards). bfloat16 inputs are multiplied
// without widening. Every other dtype runs on the kernels of isa_neon.cpp.
#include "target_region.h"

#if defined(__aarch64__)
#include "neon.h"

#define FA_ISA_NAME "neon_bf16"
#define FA_OTHER_DTYPES kNeonKernels
#define FA_DOT_BFLOAT16(sum, a, b) (F32) vbfdotq_f32((float32x4_t)(sum), (bfloat16x8_t)(a), (bfloat16x8_t)(b))
#define FA_DOT_BFLOAT16_LANE(sum, a, b) \
  (F32) vbfdotq_lane_f32((float32x4_t)(sum), (bfloat16x8_t)(b), (bfloat16x4_t)(a), 0)
#define FA_CVTPS_BF16(x) (Half16) vcvt_bf16_f32((float32x4_t)(x))
#define FA_CVTPS_BF16_2(low, high) \
  (U32) vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)(low)), (float32x4_t)(high))
#define FA_ZIP16_LOW(a, b) (U32) vzip1q_u16((uint16x8_t)(a), (uint16x8_t)(b))
#define FA_ZIP16_HIGH(a, b) (U32) vzip2q_u16((uint16x8_t)(a), (uint16x8_t)(b))

FA_TARGET_BEGIN("arch=armv8.2-a+bf16")
namespace flash_attn_ext::cpu::neon_bf16 {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::neon_bf16
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Kernels* const kNeonBf16Kernels = &neon_bf16::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kNeonBf16Kernels = nullptr;
}

#endif
