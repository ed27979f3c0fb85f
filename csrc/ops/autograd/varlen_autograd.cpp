// Autograd key of the operators on packed sequences and on caches. The operators on caches have no gradient.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "../cache/append.h"
#include "../declarations/implement.h"
#include "../declarations/library.h"
#include "../packed/varlen.h"
#include "derivatives.h"

namespace flash_attn_ext {
namespace {

struct VarlenFamily {
  static constexpr const char* kName = "flash_attn_varlen";
  using Gradients = flash_attn_ext::Gradients;
  using InputTangents = flash_attn_ext::InputTangents;
  using Forward = AttentionVarlen;
  using Backward = AttentionVarlenBackward;
  using Jvp = AttentionVarlenJvp;
  using DoubleBackward = AttentionVarlenDoubleBackward;
};

// Tells autograd that the caches changed: a node that saved a cache before must not use it.
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

FA_LIBRARY_IMPL(Autograd, m) {
  implement_derivatives<VarlenFamily>(m);
  // Without this fallback the results would seem differentiable, and gradients would silently be zero.
  m.impl(AttentionCache::kName, torch::autograd::autogradNotImplementedFallback());
}
FA_LIBRARY_IMPL(ADInplaceOrView, m) { implement<AppendToCache, append_in_place>(m); }

}  // namespace flash_attn_ext
