// int8 attention on any CPU, with products of 32-bit integers.
#include "int8.h"
#include "target_region.h"

#define FA_ISA_NAME "generic"
#define FA_TILE_FUNCTIONS kGenericKernels->tile_functions
#define FA_VECTOR_BYTES 16
#if defined(__aarch64__)
#define FA_VECTOR_REGISTERS 32
#else
#define FA_VECTOR_REGISTERS 16
#endif

namespace flash_attn_ext::cpu::int8_generic {
#include "kernels/int8_forward-inl.h"
}  // namespace flash_attn_ext::cpu::int8_generic

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8GenericKernels = &int8_generic::kKernels;
}
