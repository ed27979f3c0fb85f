// What the dispatcher knows of the operators: names, arguments, defaults.
#include <torch/library.h>

#include "ops.h"

namespace flash_attn_ext {

TORCH_LIBRARY(flash_attn_ext, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? alibi_slopes=None, "
      "Tensor? rng_state=None, *, float? scale=None, bool causal=False, bool lower_right=False, int "
      "window_left=-1, "
      "int window_right=-1, float softcap=0.0, float dropout_p=0.0, int num_splits=0, float? "
      "unified_max=None, bool deterministic=False) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor? alibi_slopes, Tensor? rng_state, Tensor out, Tensor lse, *, float? "
      "scale=None, "
      "bool causal=False, bool lower_right=False, int window_left=-1, int window_right=-1, float "
      "softcap=0.0, "
      "float dropout_p=0.0, int num_splits=0, float? unified_max=None, bool deterministic=False, bool[5] "
      "grad_mask) -> (Tensor, "
      "Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "dropout_mask(Tensor rng_state, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k, "
      "float dropout_p) -> Tensor");
}

ForwardResult call_attention(const AttentionInputs& in, const AttentionOptions& o) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flash_attn_ext::attention", "")
                             .typed<ForwardResult(FA_INPUT_ARGS, FA_OPTION_ARGS)>();
  return op.call(in.query, in.key, in.value, in.attn_mask, in.alibi_slopes, in.rng_state, o.scale, o.causal,
                 o.lower_right, o.window_left, o.window_right, o.softcap, o.dropout_p, o.num_splits,
                 o.unified_max, o.deterministic);
}

BackwardResult call_attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                       const AttentionInputs& in, const at::Tensor& out,
                                       const at::Tensor& lse, const AttentionOptions& o, const GradMask& g) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("flash_attn_ext::attention_backward", "")
          .typed<BackwardResult(const OptionalTensor&, const OptionalTensor&, FA_INPUT_ARGS,
                                const at::Tensor&, const at::Tensor&, FA_OPTION_ARGS, GradMask::Flags)>();
  return op.call(grad_out, grad_lse, in.query, in.key, in.value, in.attn_mask, in.alibi_slopes, in.rng_state,
                 out, lse, o.scale, o.causal, o.lower_right, o.window_left, o.window_right, o.softcap,
                 o.dropout_p, o.num_splits, o.unified_max, o.deterministic, g.flags());
}

}  // namespace flash_attn_ext
