// The kernels of attention with integer products. They are compiled once for each instruction set with other products of
// integers, and not for the instruction sets that add products of bfloat16.
#pragma once

#include "../core/int8.h"
#include "run.h"

namespace flash_attn_ext::cpu {

struct Int8Kernels {
  const char* isa;
  Pass<Int8Params> forward;
};

// int8_*.cpp define these. Null if the compiled architecture does not have the instruction set.
extern const Int8Kernels* const kInt8GenericKernels;
extern const Int8Kernels* const kInt8Avx2Kernels;
extern const Int8Kernels* const kInt8Avx512Kernels;
extern const Int8Kernels* const kInt8VnniKernels;

// The kernels that run if active_kernels() is the selected table.
const Int8Kernels& int8_kernels();

// Whether this CPU has AVX512-VNNI.
bool cpu_has_vnni();

}  // namespace flash_attn_ext::cpu
