// AVX-512 BF16 with AMX (Xeons from Sapphire Rapids on). Products of bfloat16 tiles run on the tile registers of AMX.
// Other dtypes, and products of decode for few rows, run on the kernels of isa_avx512_bf16.cpp.
#include "target_region.h"

// Older compilers do not know the instructions. Only Linux gives the permission (amx_permission.cpp).
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#include "avx512_bf16.h"
#if defined(FA_EMULATED_AMX)
#include "emulated_amx.h"  // in tests/cpp, in place of amx.h
#else
#include "amx.h"
#endif

#define FA_ISA_NAME "amx"
#define FA_HAS_TILE_REGISTERS
#define FA_OTHER_DTYPES kAvx512Bf16Kernels

FA_TARGET_BEGIN("amx-tile,amx-bf16,avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace flash_attn_ext::cpu::amx {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::amx
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Kernels* const kAmxKernels = &amx::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kAmxKernels = nullptr;
}

#endif
