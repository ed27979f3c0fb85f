// Autograd key of the operators on packed sequences; and of what writes to caches, which has no gradient.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "append.h"
#include "derivatives.h"
#include "kvcache.h"

namespace flash_attn_ext {
namespace {

struct VarlenFamily {
  static constexpr const char* kName = "flash_attn_varlen";
  using Forward = AttentionVarlen;
  using Backward = AttentionVarlenBackward;
  using Jvp = AttentionVarlenJvp;
  using DoubleBackward = AttentionVarlenDoubleBackward;
};

// Autograd has to know that the caches changed: what saved them before must not use them.
AppendResult append_in_place(const AppendTensors& tensors, const AppendOptions& options) {
  AppendResult result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    result = call<AppendToCache>(tensors, options);
  }
  torch::autograd::increment_version(tensors.key_cache);
  torch::autograd::increment_version(tensors.value_cache);
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement_derivatives<VarlenFamily>(m);
  // Results that seem differentiable would pass zeros on in silence.
  m.impl(AttentionCache::kName, torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(flash_attn_ext, ADInplaceOrView, m) { implement<AppendToCache, append_in_place>(m); }

}  // namespace flash_attn_ext
