// Autocast keys: q, k and v are cast to the autocast dtype, as torch does for scaled_dot_product_attention. A
// mask or slopes in float32 stay as they are: the kernels add them in float32 anyway.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace flash_attn_ext {
namespace {

template <c10::DispatchKey kAutocastKey, at::DeviceType kDevice>
ForwardResult attention_autocast(FA_INPUT_ARGS, FA_OPTION_ARGS) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey);
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  auto cast = [&](const at::Tensor& t) { return at::autocast::cached_cast(dtype, t, kDevice); };
  auto cast_unless_float32 = [&](const OptionalTensor& t) {
    return t && t->scalar_type() != at::kFloat ? OptionalTensor(cast(*t)) : t;
  };
  return call_attention({cast(query), cast(key), cast(value), cast_unless_float32(attn_mask),
                         cast_unless_float32(alibi_slopes), rng_state},
                        FA_OPTIONS);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, AutocastCPU, m) {
  m.impl("attention", attention_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}

TORCH_LIBRARY_IMPL(flash_attn_ext, AutocastCUDA, m) {
  m.impl("attention", attention_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

}  // namespace flash_attn_ext
