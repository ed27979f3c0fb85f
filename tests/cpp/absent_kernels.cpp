// For the instruction sets that the Makefile does not compile. The same symbol of isa_*.cpp takes precedence.
#include "cpu/run.h"

namespace flash_attn_ext::cpu {

#define ABSENT(kernels)                              \
  [[gnu::weak]] extern const Kernels* const kernels; \
  const Kernels* const kernels = nullptr;

ABSENT(kAvx2Kernels)
ABSENT(kAvx512Kernels)
ABSENT(kAvx512Bf16Kernels)
ABSENT(kAmxKernels)
ABSENT(kNeonKernels)
ABSENT(kNeonBf16Kernels)

}  // namespace flash_attn_ext::cpu
