// The operators of this library, as C++ functions: one argument list per operator, in the order of the
// schema.
//
//   attention            forward; differentiable
//   attention_backward   its gradients; what autograd.cpp calls, and torch.compile traces
//   dropout_mask         what dropout keeps, for tests and for dense references
//
// schema.cpp tells the dispatcher about them; autograd.cpp, autocast.cpp, meta.cpp, cpu.cpp and cuda.cpp each
// give the kernels of one dispatch key.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace flash_attn_ext {

using OptionalTensor = std::optional<at::Tensor>;

// What shapes the scores, beside the tensors; the same for forward and backward.
struct AttentionOptions {
  std::optional<double> scale;  // none: 1 / sqrt(D)
  bool causal = false;
  bool lower_right = false;  // alignment of the diagonal where S_q != S_k: false upper-left, true lower-right
  int64_t window_left = -1;  // keys before the diagonal that stay visible; -1: all
  int64_t window_right = -1;  // keys after it
  double softcap = 0.0;       // 0: none
  double dropout_p = 0.0;
  int64_t num_splits = 0;  // pieces of the keys for few queries; 0: as the shape needs. Forward only
  std::optional<double> unified_max;  // FlashDecoding++'s constant for the running maximum. Forward only
  bool deterministic = false;         // the same bits at every run; on CPU they are anyway. Backward only
};

struct AttentionInputs {
  at::Tensor query;          // (B, H, S_q, D)
  at::Tensor key;            // (B, H_kv, S_k, D)
  at::Tensor value;          // (B, H_kv, S_k, D_v)
  OptionalTensor attn_mask;  // 4-D, each size 1 or that of (B, H, S_q, S_k); bool, query's dtype, or float32
  OptionalTensor alibi_slopes;  // (H) or (B, H); float32, or query's dtype
  OptionalTensor rng_state;     // int64 {seed, offset} on query's device; needed if dropout_p > 0
};

// The type of lse and of every accumulator.
inline at::ScalarType accumulate_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Which gradients attention_backward computes; the others come back undefined.
struct GradMask {
  using Flags = std::array<bool, 5>;  // the schema's bool[5]
  bool query, key, value, attn_mask, alibi_slopes;

  static GradMask from(const Flags& f) { return {f[0], f[1], f[2], f[3], f[4]}; }
  Flags flags() const { return {query, key, value, attn_mask, alibi_slopes}; }
};

using ForwardResult = std::tuple<at::Tensor, at::Tensor>;  // out (B, H, S_q, D_v), lse (B, H, S_q)
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The flat argument lists of the schemas, written once. Every dispatch key's function takes one of them.
#define FA_INPUT_ARGS                                                                                       \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, const OptionalTensor &attn_mask, \
      const OptionalTensor &alibi_slopes, const OptionalTensor &rng_state
#define FA_OPTION_ARGS                                                                                   \
  std::optional<double> scale, bool causal, bool lower_right, int64_t window_left, int64_t window_right, \
      double softcap, double dropout_p, int64_t num_splits, std::optional<double> unified_max,           \
      bool deterministic
#define FA_INPUTS (::flash_attn_ext::AttentionInputs{query, key, value, attn_mask, alibi_slopes, rng_state})
#define FA_OPTIONS                                                                                    \
  (::flash_attn_ext::AttentionOptions{scale, causal, lower_right, window_left, window_right, softcap, \
                                      dropout_p, num_splits, unified_max, deterministic})

// Through the dispatcher.
ForwardResult call_attention(const AttentionInputs& inputs, const AttentionOptions& options);
BackwardResult call_attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                       const AttentionInputs& inputs, const at::Tensor& out,
                                       const at::Tensor& lse, const AttentionOptions& options,
                                       const GradMask& grad_mask);

}  // namespace flash_attn_ext
