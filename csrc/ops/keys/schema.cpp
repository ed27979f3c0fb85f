// Tells the dispatcher the operators' names, arguments and defaults.
#include <torch/library.h>

#include "../operators.h"

namespace flash_attn_ext {

TORCH_LIBRARY(flash_attn_ext, m) {
  const auto define = [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    m.def(schema<Op>().c_str());
  };
  for_each_operator(KernelOperators{}, define);
  for_each_operator(CpuKernelOperators{}, define);
  for_each_operator(PythonKernelOperators{}, define);
  for_each_operator(CacheWriters{}, define);
  m.def(
      "dropout_mask(Tensor rng_state, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k, "
      "float dropout_p, SymInt first_row=0) -> Tensor");
}

}  // namespace flash_attn_ext
