// Meta key: shapes and dtypes without data, for FakeTensor, torch.compile and torch.export.
#include <ATen/ops/empty.h>

#include "../declarations/implement.h"
#include "../declarations/library.h"
#include "../operators.h"

namespace flash_attn_ext {
namespace {

template <class Op>
typename Op::Result on_meta(const typename Op::Tensors& given, const typename Op::Options& options) {
  Op::check(given, options);
  return Op::empty(given, options);
}

at::Tensor dropout_mask_meta(const at::Tensor& rng_state, c10::SymInt batch, c10::SymInt heads,
                             c10::SymInt seqlen_q, c10::SymInt seqlen_k, double dropout_p,
                             c10::SymInt first_row) {
  const std::array<c10::SymInt, 4> sizes{std::move(batch), std::move(heads), std::move(seqlen_q),
                                         std::move(seqlen_k)};
  check_dropout_mask(rng_state, sizes, dropout_p, first_row);
  return at::empty_symint(sizes, rng_state.options().dtype(at::kBool));
}

}  // namespace

FA_LIBRARY_IMPL(Meta, m) {
  const auto register_operator = [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    implement<Op, on_meta<Op>>(m);
  };
  for_each_operator(KernelOperators{}, register_operator);
  for_each_operator(PythonKernelOperators{}, register_operator);
  for_each_operator(CpuOperators{}, register_operator);
  for_each_operator(CacheWriters{}, register_operator);
  m.impl("dropout_mask", dropout_mask_meta);
}

}  // namespace flash_attn_ext
