// Registers an operator's kernel for a dispatch key.
#pragma once

#include <torch/library.h>

#include "signature.h"

namespace flash_attn_ext {

// Registers `kernel` for the operator Op in the library `m`.
template <class Op, KernelOf<Op>* kernel>
void implement(torch::Library& m) {
  if constexpr (IsUnboxed<Op>::value)
    m.impl(Op::kName, &UnboxedOperator<Op>::template flat<kernel>);
  else
    m.impl(Op::kName, torch::CppFunction::makeFromBoxedFunction<&boxed_kernel<Op, kernel>>());
}

}  // namespace flash_attn_ext
