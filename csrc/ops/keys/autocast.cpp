// Autocast keys: casts each tensor by the rule in its row.
#include <ATen/autocast_mode.h>

#include "../declarations/implement.h"
#include "../declarations/library.h"
#include "../operators.h"

namespace flash_attn_ext {
namespace {

template <class Op, c10::DispatchKey kAutocastKey, at::DeviceType kDevice>
typename Op::Result autocast(const typename Op::Tensors& given, const typename Op::Options& options) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey);
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  typename Op::Tensors tensors = given;
  for_each_tensor(tensors, [&](const TensorRule& rule, auto& t) {
    const at::Tensor* from = tensor_or_null(t);
    if (!from || rule.autocast == AutocastRule::kKeep) return;
    if (rule.autocast == AutocastRule::kUnlessFloat32 && from->scalar_type() == at::kFloat) return;
    t = at::autocast::cached_cast(dtype, *from, kDevice);
  });
  return call<Op>(tensors, options);
}

}  // namespace

FA_LIBRARY_IMPL(AutocastCPU, m) {
  for_each_operator(AutocastOperators{}, [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    implement<Op, autocast<Op, c10::DispatchKey::AutocastCPU, at::kCPU>>(m);
  });
}

FA_LIBRARY_IMPL(AutocastCUDA, m) {
  for_each_operator(AutocastOperators{}, [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    implement<Op, autocast<Op, c10::DispatchKey::AutocastCUDA, at::kCUDA>>(m);
  });
}

}  // namespace flash_attn_ext
