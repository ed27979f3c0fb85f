// Meta key: shapes and dtypes without data, for FakeTensor, torch.compile and torch.export.
#include <torch/library.h>

#include "append.h"
#include "checks.h"
#include "flex/flex.h"
#include "outputs.h"
#include "weights.h"

namespace flash_attn_ext {
namespace {

AttentionResult attention_meta(const AttentionTensors& given, const AttentionOptions& options) {
  check_attention(given, options);
  return empty_result(given);
}

Gradients attention_backward_meta(const AttentionBackwardTensors& given,
                                  const AttentionBackwardOptions& options) {
  check_attention_backward(given, options);
  return empty_gradients(given.forward(), GradMask(options.grad_mask));
}

AttentionResult varlen_meta(const VarlenTensors& given, const VarlenOptions& options) {
  check_varlen(given, options);
  return empty_varlen_result(given);
}

AttentionResult cache_meta(const CacheTensors& given, const CacheOptions& options) {
  check_cache(given, options);
  return empty_cache_result(given);
}

Gradients varlen_backward_meta(const VarlenBackwardTensors& given, const VarlenBackwardOptions& options) {
  check_varlen_backward(given, options);
  return empty_varlen_gradients(given.forward(), GradMask(options.grad_mask));
}

AttentionJvpResult varlen_jvp_meta(const VarlenJvpTensors& given, const VarlenOptions& options) {
  check_varlen_jvp(given, options);
  return empty_varlen_jvp_result(given.forward());
}

Gradients varlen_double_backward_meta(const VarlenDoubleBackwardTensors& given,
                                      const VarlenBackwardOptions& options) {
  check_varlen_double_backward(given, options);
  return empty_varlen_gradients(given.forward(), GradMask(options.grad_mask));
}

AppendResult append_meta(const AppendTensors& given, const AppendOptions& options) {
  check_append(given, options);
  return empty_append_result(given);
}

AttentionJvpResult attention_jvp_meta(const AttentionJvpTensors& given, const AttentionOptions& options) {
  check_attention_jvp(given, options);
  return empty_jvp_result(given.forward());
}

Gradients attention_double_backward_meta(const AttentionDoubleBackwardTensors& given,
                                         const AttentionBackwardOptions& options) {
  check_attention_double_backward(given, options);
  return empty_gradients(given.forward(), GradMask(options.grad_mask));
}

AttentionResult flex_meta(const FlexTensors& given, const FlexOptions& options) {
  check_flex(given, options);
  return empty_result(given.attention());
}

FlexGradients flex_backward_meta(const FlexBackwardTensors& given, const FlexBackwardOptions& options) {
  check_flex_backward(given, options);
  return empty_flex_gradients(given, options);
}

WeightsResult weights_meta(const WeightsTensors& given, const WeightsOptions& options) {
  check_weights(given, options);
  return {empty_weights(given)};
}

Gradients weights_backward_meta(const WeightsBackwardTensors& given, const WeightsBackwardOptions& options) {
  check_weights_backward(given, options);
  return empty_gradients(given.forward().attention(), GradMask(options.grad_mask));
}

at::Tensor dropout_mask_meta(const at::Tensor& rng_state, c10::SymInt batch, c10::SymInt heads,
                             c10::SymInt seqlen_q, c10::SymInt seqlen_k, double dropout_p,
                             c10::SymInt first_row) {
  const std::array<c10::SymInt, 4> sizes{std::move(batch), std::move(heads), std::move(seqlen_q),
                                         std::move(seqlen_k)};
  check_dropout_mask(rng_state, sizes, dropout_p, first_row);
  return at::empty_symint(sizes, rng_state.options().dtype(at::kBool));
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Meta, m) {
  implement<Attention, attention_meta>(m);
  implement<AttentionBackward, attention_backward_meta>(m);
  implement<AttentionVarlen, varlen_meta>(m);
  implement<AttentionCache, cache_meta>(m);
  implement<AttentionVarlenBackward, varlen_backward_meta>(m);
  implement<AttentionVarlenJvp, varlen_jvp_meta>(m);
  implement<AttentionVarlenDoubleBackward, varlen_double_backward_meta>(m);
  implement<AppendToCache, append_meta>(m);
  implement<AttentionJvp, attention_jvp_meta>(m);
  implement<AttentionDoubleBackward, attention_double_backward_meta>(m);
  implement<AttentionFlex, flex_meta>(m);
  implement<AttentionFlexBackward, flex_backward_meta>(m);
  implement<AttentionWeights, weights_meta>(m);
  implement<AttentionWeightsBackward, weights_backward_meta>(m);
  m.impl("dropout_mask", dropout_mask_meta);
}

}  // namespace flash_attn_ext
