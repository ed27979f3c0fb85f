// Autograd key of attention and its derivatives.
#include <torch/library.h>

#include "derivatives.h"

namespace flash_attn_ext {
namespace {

struct AttentionFamily {
  static constexpr const char* kName = "flash_attn";
  using Forward = Attention;
  using Backward = AttentionBackward;
  using Jvp = AttentionJvp;
  using DoubleBackward = AttentionDoubleBackward;
};

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) { implement_derivatives<AttentionFamily>(m); }

}  // namespace flash_attn_ext
