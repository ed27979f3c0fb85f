// int8 attention with AVX-512 F, BW, DQ and VL: bytes are widened to int16.
#include "int8.h"
#include "target_region.h"

#if defined(__x86_64__)
#include "avx512.h"

#define FA_ISA_NAME "avx512"
#define FA_TILE_FUNCTIONS kAvx512Kernels->tile_functions

FA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace flash_attn_ext::cpu::int8_avx512 {
#include "kernels/int8_forward-inl.h"
}  // namespace flash_attn_ext::cpu::int8_avx512
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8Avx512Kernels = &int8_avx512::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8Avx512Kernels = nullptr;
}

#endif
