// The attention weights as a result of their own, declared as in ops.h.
//
//   attention_weights            softmax of the scores after dropout, averaged over the heads; differentiable
//   attention_weights_backward   its gradients
//
// lse is that of attention on the same arguments: a number that is known, not one to differentiate by. The gradients are
// those of the whole softmax.
#pragma once

#include "ops.h"
#include "pack_params.h"

namespace flash_attn_ext {

constexpr Shape kWeightsShape{Shape::kExact, 3, {Dim::kBatch, Dim::kSeqlenQ, Dim::kSeqlenK}};

// clang-format off
#define FA_WEIGHTS_DIFFERENTIABLE(X)                                                            \
  FA_QUERY_AND_KEY(X)                                                                           \
  FA_ADDED_TO_SCORES(X)

#define FA_WEIGHTS_TENSORS(X)                                                                   \
  FA_WEIGHTS_DIFFERENTIABLE(X)                                                                  \
  FA_WITHOUT_GRADIENT(X)                                                                        \
  X(lse,           at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)

#define FA_WEIGHTS_BACKWARD_TENSORS(X)                                                          \
  X(grad_weights,  at::Tensor,     kWeightsShape, kOfQuery,     kKeep,       kBatch)            \
  FA_WEIGHTS_TENSORS(X)

#define FA_WEIGHTS_BACKWARD_OPTIONS(X)                                                                           \
  FA_SCORE_OPTIONS(X)                                                                                            \
  /* As attention_backward's; value's must be false. */                                                          \
  X(grad_mask,      GradFlags,              {},           true,                             "")

#define FA_WEIGHTS_RESULT(X)                                                                    \
  X(weights,       at::Tensor)  /* (B, S_q, S_k), query's dtype */
// clang-format on

struct WeightsTensors {
  FA_TENSOR_FIELDS(FA_WEIGHTS_TENSORS)
  // The call of attention whose weights these are; its value has no columns.
  AttentionTensors attention() const;
};
struct WeightsOptions {
  FA_OPTION_FIELDS(FA_SCORE_OPTIONS)
  AttentionOptions attention() const {
    AttentionOptions options;
#define FA_COPY(name, ...) options.name = name;
    FA_SCORE_OPTIONS(FA_COPY)
#undef FA_COPY
    return options;
  }
};
struct WeightsResult {
  FA_WEIGHTS_RESULT(FA_TENSOR_FIELD)
  FA_MEMBERS(FA_WEIGHTS_RESULT)
};
struct AttentionWeights {
  static constexpr const char* kName = "attention_weights";
  static std::string results() { return "(Tensor weights)"; }
  using Tensors = WeightsTensors;
  using Options = WeightsOptions;
  using Result = WeightsResult;
};

struct WeightsBackwardTensors {
  FA_TENSOR_FIELDS(FA_WEIGHTS_BACKWARD_TENSORS)
  WeightsTensors forward() const { FA_PICK(WeightsTensors, FA_WEIGHTS_TENSORS) }
  void set_forward(const WeightsTensors& forward) { FA_SET(forward, FA_WEIGHTS_TENSORS) }
};
struct WeightsBackwardOptions {
  FA_OPTION_FIELDS(FA_WEIGHTS_BACKWARD_OPTIONS)
  WeightsOptions forward() const { FA_PICK(WeightsOptions, FA_SCORE_OPTIONS) }
  void set_forward(const WeightsOptions& forward) { FA_SET(forward, FA_SCORE_OPTIONS) }
};
// Results are those of PerGradient, in its order; value's is never there.
struct AttentionWeightsBackward {
  static constexpr const char* kName = "attention_weights_backward";
  static std::string results() { return tensor_list(kGradients); }
  using Tensors = WeightsBackwardTensors;
  using Options = WeightsBackwardOptions;
  using Result = Gradients;
};

// Checked as in checks.h.
void check_weights(const WeightsTensors& tensors, const WeightsOptions& options);
void check_weights_backward(const WeightsBackwardTensors& tensors, const WeightsBackwardOptions& options);

at::Tensor empty_weights(const WeightsTensors& tensors);

// The params, and what they point to.
struct PackedWeights {
  AttentionTensors tensors;
  at::Tensor lse;
  WeightsParams params;
};
PackedWeights pack_weights(const WeightsTensors& given, const WeightsOptions& options,
                           const at::Tensor& weights);
PackedBackward pack_weights_backward(const WeightsBackwardTensors& given,
                                     const WeightsBackwardOptions& options, const Gradients& result);

}  // namespace flash_attn_ext
