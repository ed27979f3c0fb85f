// Autograd key of attention and its derivatives.
#include <torch/library.h>

#include "derivatives.h"

namespace flash_attn_ext {

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) { implement_derivatives<AttentionFamily>(m); }

}  // namespace flash_attn_ext
