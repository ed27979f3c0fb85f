// Meta key: shapes and dtypes without data, for FakeTensor, torch.compile and torch.export.
#include <torch/library.h>

#include "checks.h"
#include "outputs.h"

namespace flash_attn_ext {
namespace {

ForwardResult attention_meta(FA_INPUT_ARGS, FA_OPTION_ARGS) {
  const AttentionInputs given = FA_INPUTS;
  check_attention(given, FA_OPTIONS);
  return empty_forward_result(given);
}

BackwardResult attention_backward_meta(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                       FA_INPUT_ARGS, const at::Tensor& out, const at::Tensor& lse,
                                       FA_OPTION_ARGS, GradMask::Flags grad_mask) {
  const GradMask wanted = GradMask::from(grad_mask);
  const AttentionInputs given = FA_INPUTS;
  check_attention_backward(grad_out, grad_lse, given, out, lse, FA_OPTIONS, wanted);
  return empty_backward_result(given, wanted);
}

at::Tensor dropout_mask_meta(const at::Tensor& rng_state, c10::SymInt batch, c10::SymInt heads,
                             c10::SymInt seqlen_q, c10::SymInt seqlen_k, double dropout_p) {
  const std::array<c10::SymInt, 4> sizes{std::move(batch), std::move(heads), std::move(seqlen_q),
                                         std::move(seqlen_k)};
  check_dropout_mask(rng_state, sizes, dropout_p);
  return at::empty_symint(sizes, rng_state.options().dtype(at::kBool));
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Meta, m) {
  m.impl("attention", attention_meta);
  m.impl("attention_backward", attention_backward_meta);
  m.impl("dropout_mask", dropout_mask_meta);
}

}  // namespace flash_attn_ext
