// Autocast keys: each tensor is cast as its row in the declaration says.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace flash_attn_ext {
namespace {

template <c10::DispatchKey kAutocastKey, at::DeviceType kDevice>
AttentionResult attention_autocast(const AttentionTensors& given, const AttentionOptions& options) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey);
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  AttentionTensors tensors = given;
  for_each_tensor(tensors, [&](const TensorRule& rule, auto& t) {
    const at::Tensor* from = tensor_or_null(t);
    if (!from || rule.autocast == AutocastRule::kKeep) return;
    if (rule.autocast == AutocastRule::kUnlessFloat32 && from->scalar_type() == at::kFloat) return;
    t = at::autocast::cached_cast(dtype, *from, kDevice);
  });
  return call<Attention>(tensors, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, AutocastCPU, m) {
  implement<Attention, attention_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>>(m);
}

TORCH_LIBRARY_IMPL(flash_attn_ext, AutocastCUDA, m) {
  implement<Attention, attention_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>>(m);
}

}  // namespace flash_attn_ext
