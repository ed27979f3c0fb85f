// AVX-512 with its dot products of bfloat16 and int16 (Cooper Lake, Sapphire Rapids, Zen 4 onwards). bfloat16
// inputs, and int8 caches of bfloat16 queries, are multiplied without widening to float32. Calls with other dtypes run on the
// kernels of isa_avx512.cpp.
#include "target_region.h"

#if defined(__x86_64__)
#include "avx512_bf16.h"

#define FA_ISA_NAME "avx512_bf16"
#define FA_OTHER_DTYPES kAvx512Kernels
#define FA_HAS_FUNCTIONS_FOR_AMX

FA_TARGET_BEGIN("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace flash_attn_ext::cpu::avx512_bf16 {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::avx512_bf16
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Bf16Kernels = &avx512_bf16::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Bf16Kernels = nullptr;
}

#endif
