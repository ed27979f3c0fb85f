#include "int8.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "../checks/check_tensors.h"
#include "../declarations/library.h"
#include "../dense/pack_params.h"

namespace flash_attn_ext {

AttentionTensors Int8Tensors::attention() const {
  AttentionTensors tensors;
#define FA_COPY(name, ...) tensors.name = name;
  FA_INT8_TENSORS(FA_COPY)
#undef FA_COPY
  return tensors;
}

AttentionOptions Int8Options::attention() const {
  AttentionOptions options;
#define FA_COPY(name, ...) options.name = name;
  FA_SCORE_OPTIONS_BEFORE_DROPOUT(FA_COPY)
#undef FA_COPY
  return options;
}

void Int8Options::check() const { attention().check(); }

void AttentionInt8::check(const Tensors& in, const Options& options) {
  check_rows(in, options, [](DimSizes&) {});
  TORCH_CHECK_TYPE(
      in.query.scalar_type() != at::kDouble,
      "query: got dtype torch.float64 with quantize='int8'; allowed: float32, bfloat16, float16");
  TORCH_CHECK_NOT_IMPLEMENTED(in.query.is_cpu() || in.query.is_meta(),
                              "quantize: got 'int8' with tensors on ", in.query.device(),
                              "; allowed: tensors on CPU");
}

AttentionResult AttentionInt8::empty(const Tensors& in, const Options& options) {
  return Attention::empty(in.attention(), options.attention());
}

Packed<AttentionInt8> AttentionInt8::pack(const Tensors& given, const Options& options,
                                          const Result& result) {
  Packed<AttentionInt8> packed{to_kernel_layout(given), {}, {}};
  static_cast<AttentionParams&>(packed.params) =
      pack_attention(packed.tensors.attention(), result.out, result.lse, options.attention());
  return packed;
}

FA_LIBRARY_IMPL(Autograd, m) {
  // Without this fallback the results would seem differentiable, and gradients would silently be zero.
  m.impl(AttentionInt8::kName, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace flash_attn_ext
