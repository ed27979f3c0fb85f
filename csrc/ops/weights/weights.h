// Declares the attention weights as a result, with the rows of dense/attention.h.
//
//   attention_weights            softmax of the scores after dropout, averaged over the heads; differentiable
//   attention_weights_backward   the gradients of attention_weights
//
// The caller passes lse, which attention returned for the same arguments. The gradients are the gradients of the whole
// softmax: lse is a function of the other inputs, and its own gradient is not returned.
#pragma once

#include "../dense/attention.h"

namespace flash_attn_ext {

constexpr Shape kWeightsShape{Shape::kExact, 3, {Dim::kBatch, Dim::kSeqlenQ, Dim::kSeqlenK}};

// clang-format off
#define FA_WEIGHTS_DIFFERENTIABLE(X) \
  FA_QUERY_AND_KEY_ROWS(FA_SAME, X)  \
  FA_MASK_ROW(FA_SAME, X)            \
  FA_PER_HEAD(X)

#define FA_WEIGHTS_INPUTS(X)   \
  FA_WEIGHTS_DIFFERENTIABLE(X) \
  FA_WITHOUT_GRADIENT(X)

#define FA_WEIGHTS_TENSORS(X)                                                                   \
  FA_WEIGHTS_INPUTS(X)                                                                          \
  X(lse,           at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)

#define FA_WEIGHTS_BACKWARD_TENSORS(X)                                                          \
  X(grad_weights,  at::Tensor,     kWeightsShape, kOfQuery,     kKeep,       kBatch)            \
  FA_WEIGHTS_TENSORS(X)

// The flag of value in grad_mask must be false.
#define FA_WEIGHTS_BACKWARD_OPTIONS(X) \
  FA_SCORE_OPTIONS(X)                  \
  FA_GRAD_MASK_OPTION(X)

#define FA_WEIGHTS_RESULT(X)                                                                    \
  X(weights,       at::Tensor)  /* (B, S_q, S_k), query's dtype */
// clang-format on

struct WeightsTensors {
  FA_TENSOR_FIELDS(FA_WEIGHTS_TENSORS, same_rule)
  // The tensors of attention with these scores. Its value has no columns.
  AttentionTensors attention() const;
};
struct WeightsOptions {
  FA_OPTION_FIELDS(FA_SCORE_OPTIONS)
  AttentionOptions attention() const;
};
struct WeightsResult {
  FA_RESULT_FIELDS(FA_WEIGHTS_RESULT)
};
struct AttentionWeights : OperatorTypes<WeightsTensors, WeightsOptions, WeightsResult, WeightsParams> {
  static constexpr const char* kName = "attention_weights";
  FA_OPERATOR_STEPS(AttentionWeights)
};

struct WeightsBackwardTensors {
  FA_TENSOR_FIELDS(FA_WEIGHTS_BACKWARD_TENSORS, same_rule)
  FA_FORWARD_ACCESS(WeightsTensors, FA_WEIGHTS_TENSORS)
};
struct WeightsBackwardOptions {
  FA_OPTION_FIELDS(FA_WEIGHTS_BACKWARD_OPTIONS)
  FA_FORWARD_ACCESS(WeightsOptions, FA_SCORE_OPTIONS)
};
// value's gradient is undefined
struct AttentionWeightsBackward
    : OperatorTypes<WeightsBackwardTensors, WeightsBackwardOptions, Gradients, BackwardParams> {
  static constexpr const char* kName = "attention_weights_backward";
  FA_OPERATOR_STEPS(AttentionWeightsBackward)
};

}  // namespace flash_attn_ext
