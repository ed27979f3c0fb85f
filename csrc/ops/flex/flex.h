// Attention with functions of the user (core/program.h), with the rows of dense/attention.h.
//
//   attention_flex            forward; differentiable once, in reverse mode
//   attention_flex_backward   its gradients
//
// Operators of their own, so that attention's schema, its calls of 5 us, and its rules for torch.func and torch.vmap do not
// depend on programs.
#pragma once

#include <memory>

#include "../../core/program.h"
#include "../dense/attention.h"

namespace flash_attn_ext {

constexpr Shape kProgramDataShape{Shape::kCheckedByOperator};

// clang-format off
#define FA_FLEX_DIFFERENTIABLE(X)                                                                          \
  FA_DIFFERENTIABLE(X)                                                                           \
  /* (N), the accumulators' type: elements that score functions read. */                                   \
  X(captured,      OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)

#define FA_FLEX_TENSORS(X)                                                                                 \
  FA_FLEX_DIFFERENTIABLE(X)                                                                                \
  FA_WITHOUT_GRADIENT(X)                                                                                   \
  /* (N), int32, and int64 for float64 inputs: integers that functions read. */                            \
  X(captured_ints, OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)                    \
  /* (B or 1, H or 1, rows, columns), uint8: BlockStates. */                                               \
  X(block_states,  OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)                    \
  /* (N), int64: where the programs of score, gradient, captured gradient and mask begin, or -1; programs. */ \
  X(programs,      OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)

#define FA_FLEX_OPTIONS(X)                                                                                       \
  FA_ATTENTION_OPTIONS(X)                                                                                        \
  /* Queries and keys of a block of block_states. */                                                             \
  X(block_size_q,   int64_t,                128,          v >= 1,                           "1 or more")         \
  X(block_size_k,   int64_t,                128,          v >= 1,                           "1 or more")

#define FA_FLEX_BACKWARD_TENSORS(X)                                                                        \
  FA_COTANGENTS(X)                                                                                         \
  FA_FLEX_TENSORS(X)                                                                                       \
  FA_RESULTS(X)

#define FA_FLEX_BACKWARD_OPTIONS(X)                                                                              \
  FA_FLEX_OPTIONS(X)                                                                                             \
  FA_GRAD_MASK_OPTION(X)                                                                                         \
  X(grad_captured,  bool,                   false,        true,                             "")
// clang-format on

struct FlexTensors {
  FA_TENSOR_FIELDS(FA_FLEX_TENSORS, same_rule)
  AttentionTensors attention() const {
    AttentionTensors tensors;
#define FA_COPY(name, ...) tensors.name = name;
    FA_ATTENTION_TENSORS(FA_COPY)
#undef FA_COPY
    return tensors;
  }
};
struct FlexOptions {
  FA_OPTION_FIELDS(FA_FLEX_OPTIONS)
  AttentionOptions attention() const { FA_PICK(AttentionOptions, FA_ATTENTION_OPTIONS) }
};
struct AttentionFlex {
  static constexpr const char* kName = "attention_flex";
  static std::string results() { return "(Tensor out, Tensor lse)"; }
  using Tensors = FlexTensors;
  using Options = FlexOptions;
  using Result = AttentionResult;
  using Params = AttentionParams;
  FA_OPERATOR_STEPS(AttentionFlex)
};

struct FlexGradients {  // undefined where not wanted
#define FA_GRADIENT_FIELD(name, ...) at::Tensor name;
#define FA_GRADIENT_TYPE(name, ...) , at::Tensor
  FA_FLEX_DIFFERENTIABLE(FA_GRADIENT_FIELD)
  using MemberTypes = decltype(without_first(Types<void FA_FLEX_DIFFERENTIABLE(FA_GRADIENT_TYPE)>{}));
#undef FA_GRADIENT_FIELD
#undef FA_GRADIENT_TYPE
  auto tie() { return tie_but_first(0 FA_FLEX_DIFFERENTIABLE(FA_NAME)); }
  auto tie() const { return tie_but_first(0 FA_FLEX_DIFFERENTIABLE(FA_NAME)); }
  Gradients attention() const { FA_PICK(Gradients, FA_DIFFERENTIABLE) }
  void set_attention(const Gradients& gradients) { FA_SET(gradients, FA_DIFFERENTIABLE) }
};
constexpr size_t kFlexGradients = kGradients + 1;

struct FlexBackwardTensors {
  FA_TENSOR_FIELDS(FA_FLEX_BACKWARD_TENSORS, same_rule)
  FlexTensors forward() const { FA_PICK(FlexTensors, FA_FLEX_TENSORS) }
  void set_forward(const FlexTensors& forward){FA_SET(forward, FA_FLEX_TENSORS)} AttentionBackwardTensors
      attention() const;
};
struct FlexBackwardOptions {
  FA_OPTION_FIELDS(FA_FLEX_BACKWARD_OPTIONS)
  FlexOptions forward() const { FA_PICK(FlexOptions, FA_FLEX_OPTIONS) }
  void set_forward(const FlexOptions& forward){FA_SET(forward, FA_FLEX_OPTIONS)} AttentionBackwardOptions
      attention() const {
    AttentionBackwardOptions options;
    options.set_forward(forward().attention());
    options.grad_mask = grad_mask;
    return options;
  }
};
struct AttentionFlexBackward {
  static constexpr const char* kName = "attention_flex_backward";
  static std::string results() { return tensor_list(kFlexGradients); }
  using Tensors = FlexBackwardTensors;
  using Options = FlexBackwardOptions;
  using Result = FlexGradients;
  using Params = BackwardParams;
  FA_OPERATOR_STEPS(AttentionFlexBackward)
};

// The params also point to the functions.
template <class Op>
struct PackedFlex {
  typename Op::Tensors tensors;
  PerHead<at::Tensor> per_head;
  typename Op::Params params;
  std::unique_ptr<UserFunctions> functions;
};
template <>
struct Packed<AttentionFlex> : PackedFlex<AttentionFlex> {};
template <>
struct Packed<AttentionFlexBackward> : PackedFlex<AttentionFlexBackward> {};

}  // namespace flash_attn_ext
