// Autocast keys: each tensor is cast as its row in the declaration says.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "flex/flex.h"
#include "ops.h"
#include "varlen.h"
#include "weights.h"

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

TORCH_LIBRARY_IMPL(flash_attn_ext, AutocastCPU, m) {
  implement<Attention, autocast<Attention, c10::DispatchKey::AutocastCPU, at::kCPU>>(m);
  implement<AttentionVarlen, autocast<AttentionVarlen, c10::DispatchKey::AutocastCPU, at::kCPU>>(m);
  implement<AttentionFlex, autocast<AttentionFlex, c10::DispatchKey::AutocastCPU, at::kCPU>>(m);
  implement<AttentionWeights, autocast<AttentionWeights, c10::DispatchKey::AutocastCPU, at::kCPU>>(m);
}

TORCH_LIBRARY_IMPL(flash_attn_ext, AutocastCUDA, m) {
  implement<Attention, autocast<Attention, c10::DispatchKey::AutocastCUDA, at::kCUDA>>(m);
  implement<AttentionVarlen, autocast<AttentionVarlen, c10::DispatchKey::AutocastCUDA, at::kCUDA>>(m);
  implement<AttentionFlex, autocast<AttentionFlex, c10::DispatchKey::AutocastCUDA, at::kCUDA>>(m);
  implement<AttentionWeights, autocast<AttentionWeights, c10::DispatchKey::AutocastCUDA, at::kCUDA>>(m);
}

}  // namespace flash_attn_ext
