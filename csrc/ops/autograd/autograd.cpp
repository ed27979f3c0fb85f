// Autograd key of attention and its derivatives.
#include "../declarations/library.h"
#include "derivatives.h"

namespace flash_attn_ext {

FA_LIBRARY_IMPL(Autograd, m) { implement_derivatives<AttentionFamily>(m); }

}  // namespace flash_attn_ext
