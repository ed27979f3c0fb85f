// Autograd key of attention with functions of the user.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "../autograd/derivatives.h"
#include "../declarations/library.h"
#include "flex.h"

namespace flash_attn_ext {
namespace {

struct FlexFamily {
  static constexpr const char* kName = "flex_attention";
  using Gradients = FlexGradients;
  using InputTangents = FlexInputTangents;
  using Forward = AttentionFlex;
  using Backward = AttentionFlexBackward;
  using Jvp = AttentionFlexJvp;
  using DoubleBackward = AttentionFlexDoubleBackward;
};

struct VarlenFlexFamily {
  static constexpr const char* kName = "flash_attn_varlen";
  using Gradients = FlexGradients;
  using InputTangents = FlexInputTangents;
  using Forward = AttentionVarlenFlex;
  using Backward = AttentionVarlenFlexBackward;
  using Jvp = AttentionVarlenFlexJvp;
  using DoubleBackward = AttentionVarlenFlexDoubleBackward;
};

}  // namespace

FA_LIBRARY_IMPL(Autograd, m) {
  implement_derivatives<FlexFamily>(m);
  implement_derivatives<VarlenFlexFamily>(m);
  // Without this fallback the results would seem differentiable, and gradients would silently be zero.
  m.impl(AttentionCacheFlex::kName, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace flash_attn_ext
