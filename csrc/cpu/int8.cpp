#include "int8.h"

#include "select.h"

namespace flash_attn_ext::cpu {

bool cpu_has_vnni() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

const Int8Kernels& int8_kernels() {
  const Kernels* const active = &active_kernels();
  if (active == kGenericKernels || !kInt8Avx2Kernels) return *kInt8GenericKernels;
  if (active == kAvx2Kernels) return *kInt8Avx2Kernels;
  return cpu_has_vnni() ? *kInt8VnniKernels : *kInt8Avx512Kernels;
}

}  // namespace flash_attn_ext::cpu
