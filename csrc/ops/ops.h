// Declares the operators of this library: each tensor and each option is one row of a list, and stands nowhere else.
//
//   attention            forward; differentiable
//   attention_backward   its gradients; what autograd.cpp calls, and torch.compile traces
//   attention_jvp        forward mode: attention and the tangents of its results; differentiable
//   attention_double_backward   the gradient of <results of attention_jvp, grad_out and grad_lse>, which is also that of
//                        <results of attention_backward, tangents>. Second derivatives need no more: derivative_formulas.md
//   attention_weights    softmax(Q K^T) averaged over the heads, and its gradients: weights.h
//   dropout_mask         what dropout keeps, for tests and for dense references
//
// Letters: B batch, H query heads, H_kv key/value heads, S_q and S_k sequence lengths, D head dimension of query and
// key, D_v of value and out. signature.h turns rows into schemas, structs and arguments; argument_kinds.h has their words.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>

#include "signature.h"

namespace flash_attn_ext {

constexpr int64_t kMaxHeadDim = 512;

constexpr Shape kQueryShape{Shape::kExact, 4, {Dim::kBatch, Dim::kHeads, Dim::kSeqlenQ, Dim::kHeadDim}};
constexpr Shape kKeyShape{Shape::kExact, 4, {Dim::kBatch, Dim::kHeadsKv, Dim::kSeqlenK, Dim::kHeadDim}};
constexpr Shape kValueShape{Shape::kExact, 4, {Dim::kBatch, Dim::kHeadsKv, Dim::kSeqlenK, Dim::kHeadDimV}};
constexpr Shape kOutShape{Shape::kExact, 4, {Dim::kBatch, Dim::kHeads, Dim::kSeqlenQ, Dim::kHeadDimV}};
constexpr Shape kLseShape{Shape::kExact, 3, {Dim::kBatch, Dim::kHeads, Dim::kSeqlenQ}};
constexpr Shape kMaskShape{Shape::kBroadcast, 4, {Dim::kBatch, Dim::kHeads, Dim::kSeqlenQ, Dim::kSeqlenK}};
constexpr Shape kKeyMaskShape{Shape::kExact, 2, {Dim::kBatch, Dim::kSeqlenK}};
constexpr Shape kPerHeadShape{Shape::kMaybeBatched, 2, {Dim::kBatch, Dim::kHeads}};
constexpr Shape kRngStateShape{Shape::kSeedOffset};

// clang-format off
// Tensors with a gradient, in the order of attention_backward's results.
//   name          type            shape          dtype      autocast        vmap
#define FA_ATTENTION_DIFFERENTIABLE(X)                                                          \
  FA_QUERY_AND_KEY(X)                                                                           \
  X(value,         at::Tensor,     kValueShape,   kOfQuery,  kCast,          kBatch)            \
  FA_ADDED_TO_SCORES(X)

#define FA_QUERY_AND_KEY(X)                                                                     \
  X(query,         at::Tensor,     kQueryShape,   kFloating, kCast,          kBatch)            \
  X(key,           at::Tensor,     kKeyShape,     kOfQuery,  kCast,          kBatch)

#define FA_ADDED_TO_SCORES(X)                                                                   \
  /* bool: true attends. Float: added to the scores. */                                         \
  X(attn_mask,     OptionalTensor, kMaskShape,    kMask,     kUnlessFloat32, kBatchOrOne)       \
  /* -slope * |i + diagonal - j| is added to the scores. */                                     \
  X(alibi_slopes,  OptionalTensor, kPerHeadShape, kAdded,    kUnlessFloat32, kPerHead)          \
  /* One more column of the softmax, a score without a value. */                                \
  X(sink,          OptionalTensor, kPerHeadShape, kAdded,    kUnlessFloat32, kPerHead)

// A tangent for each of them, in their order.
#define FA_ATTENTION_TANGENTS(X)                                                                       \
  X(tangent_query,        OptionalTensor, kQueryShape,   kOfQuery, kKeep, kBatch)                      \
  X(tangent_key,          OptionalTensor, kKeyShape,     kOfQuery, kKeep, kBatch)                      \
  X(tangent_value,        OptionalTensor, kValueShape,   kOfQuery, kKeep, kBatch)                      \
  X(tangent_attn_mask,    OptionalTensor, kMaskShape,    kAdded,   kKeep, kBatchOrOne)                 \
  X(tangent_alibi_slopes, OptionalTensor, kPerHeadShape, kAdded,   kKeep, kPerHead)                    \
  X(tangent_sink,         OptionalTensor, kPerHeadShape, kAdded,   kKeep, kPerHead)

#define FA_ATTENTION_TENSORS(X)                                                                 \
  FA_ATTENTION_DIFFERENTIABLE(X)                                                                \
  FA_WITHOUT_GRADIENT(X)

#define FA_WITHOUT_GRADIENT(X)                                                                  \
  /* {seed, offset} of dropout, on query's device; needed if dropout_p > 0. For a part of a */   \
  /* larger call also {row, column, head, heads}: DropoutParams. */                              \
  X(rng_state,     OptionalTensor, kRngStateShape, kInt64,   kKeep,          kLoop)             \
  /* A second mask, bool or float as attn_mask, one element for each key. It has no gradient. */ \
  X(key_mask,      OptionalTensor, kKeyMaskShape, kMask,     kUnlessFloat32, kBatch)

//   name           type                    default       check, of the value v             what is allowed
#define FA_ATTENTION_OPTIONS(X)                                                                                  \
  FA_SCORE_OPTIONS(X)                                                                                            \
  /* Pieces of the keys for few queries; 0: as the shape needs. Forward only. */                                 \
  X(num_splits,     int64_t,                0,            v >= 0,                "0 (chosen by the shape) or more") \
  /* FlashDecoding++'s constant in place of the running maximum. Forward only. */                                \
  X(unified_max,    std::optional<double>,  std::nullopt, !v || std::isfinite(*v),          "a finite number")   \
  /* The same bits at every run; on CPU they are anyway. Backward only. */                                       \
  X(deterministic,  bool,                   false,        true,                             "")

#define FA_SCORE_OPTIONS(X)                                                                                      \
  /* Factor of <q, k>; none: 1 / sqrt(D). */                                                                     \
  X(scale,          std::optional<double>,  std::nullopt, !v || std::isfinite(*v),          "a finite number")   \
  X(causal,         bool,                   false,        true,                             "")                  \
  /* Where the diagonal lies if S_q != S_k: false upper-left, true lower-right. */                               \
  X(lower_right,    bool,                   false,        true,                             "")                  \
  /* Added to where the diagonal lies: for a part of a larger score matrix. */                                   \
  X(diagonal,       int64_t,                0,            true,                             "")                  \
  /* Key j is visible to query i if -window_left <= j - (i + diagonal) <= window_right; none: no limit. */       \
  X(window_left,    std::optional<int64_t>, std::nullopt, true,                             "")                  \
  X(window_right,   std::optional<int64_t>, std::nullopt, true,                             "")                  \
  X(softcap,        double,                 0.0,          std::isfinite(v) && v >= 0,                            \
    "0 (none) or a positive finite number")                                                                      \
  X(dropout_p,      double,                 0.0,          v >= 0.0 && v <= 1.0,             "0 to 1")

#define FA_ATTENTION_BACKWARD_TENSORS(X)                                                        \
  X(grad_out,      OptionalTensor, kOutShape,     kOfQuery,     kKeep,       kBatch)            \
  X(grad_lse,      OptionalTensor, kLseShape,     kAccumulator, kKeep,       kBatch)            \
  FA_ATTENTION_TENSORS(X)                                                                       \
  X(out,           at::Tensor,     kOutShape,     kOfQuery,     kKeep,       kBatch)            \
  X(lse,           at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)

#define FA_ATTENTION_JVP_TENSORS(X)                                                             \
  FA_ATTENTION_TANGENTS(X)                                                                      \
  FA_ATTENTION_TENSORS(X)

#define FA_ATTENTION_DOUBLE_BACKWARD_TENSORS(X)                                                 \
  X(grad_out,      OptionalTensor, kOutShape,     kOfQuery,     kKeep,       kBatch)            \
  X(grad_lse,      OptionalTensor, kLseShape,     kAccumulator, kKeep,       kBatch)            \
  FA_ATTENTION_JVP_TENSORS(X)                                                                   \
  X(out,           at::Tensor,     kOutShape,     kOfQuery,     kKeep,       kBatch)            \
  X(lse,           at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)            \
  X(tangent_out,   at::Tensor,     kOutShape,     kOfQuery,     kKeep,       kBatch)            \
  X(tangent_lse,   at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)

#define FA_ATTENTION_BACKWARD_OPTIONS(X)                                                                         \
  FA_ATTENTION_OPTIONS(X)                                                                                        \
  /* Which gradients are wanted; the others come back undefined. */                                              \
  X(grad_mask,      GradFlags,              {},           true,                             "")

#define FA_ATTENTION_RESULT(X)                                                                  \
  X(out,           at::Tensor)  /* (B, H, S_q, D_v), query's dtype */                           \
  X(lse,           at::Tensor)  /* (B, H, S_q), the accumulators' type */

#define FA_ATTENTION_JVP_RESULT(X)                                                              \
  FA_ATTENTION_RESULT(X)                                                                        \
  X(tangent_out,   at::Tensor)                                                                  \
  X(tangent_lse,   at::Tensor)
// clang-format on

// A value for each tensor that has a gradient, by name.
template <class Value>
struct PerGradient {
#define FA_VALUE_FIELD(name, ...) Value name{};
#define FA_VALUE_TYPE(name, ...) , Value
  FA_ATTENTION_DIFFERENTIABLE(FA_VALUE_FIELD)
  using MemberTypes = decltype(without_first(Types<void FA_ATTENTION_DIFFERENTIABLE(FA_VALUE_TYPE)>{}));
  auto tie() { return tie_but_first(0 FA_ATTENTION_DIFFERENTIABLE(FA_NAME)); }
  auto tie() const { return tie_but_first(0 FA_ATTENTION_DIFFERENTIABLE(FA_NAME)); }
  static constexpr const char* kNames[] = {FA_ATTENTION_DIFFERENTIABLE(FA_QUOTED_NAME)};
#undef FA_VALUE_FIELD
#undef FA_VALUE_TYPE
};
constexpr size_t kGradients = std::size(PerGradient<bool>::kNames);

using Gradients = PerGradient<at::Tensor>;       // undefined where not wanted
using GradFlags = std::array<bool, kGradients>;  // as the dispatcher passes it
struct GradMask : PerGradient<bool> {
  GradMask() = default;
  explicit GradMask(const GradFlags& flags) { tie() = std::tuple_cat(flags); }
};

struct AttentionTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_TENSORS)
};
struct AttentionOptions {
  FA_OPTION_FIELDS(FA_ATTENTION_OPTIONS)
};
struct AttentionResult {
  FA_ATTENTION_RESULT(FA_TENSOR_FIELD)
  FA_MEMBERS(FA_ATTENTION_RESULT)
};
struct Attention {
  static constexpr const char* kName = "attention";
  static std::string results() { return "(Tensor out, Tensor lse)"; }
  using Tensors = AttentionTensors;
  using Options = AttentionOptions;
  using Result = AttentionResult;
};

// Results are those of PerGradient, in its order.
struct AttentionBackwardTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_BACKWARD_TENSORS)
  AttentionTensors forward() const { FA_PICK(AttentionTensors, FA_ATTENTION_TENSORS) }
  void set_forward(const AttentionTensors& forward) { FA_SET(forward, FA_ATTENTION_TENSORS) }
};
struct AttentionBackwardOptions {
  FA_OPTION_FIELDS(FA_ATTENTION_BACKWARD_OPTIONS)
  AttentionOptions forward() const { FA_PICK(AttentionOptions, FA_ATTENTION_OPTIONS) }
  void set_forward(const AttentionOptions& forward) { FA_SET(forward, FA_ATTENTION_OPTIONS) }
};
struct AttentionBackward {
  static constexpr const char* kName = "attention_backward";
  static std::string results() { return tensor_list(kGradients); }
  using Tensors = AttentionBackwardTensors;
  using Options = AttentionBackwardOptions;
  using Result = Gradients;
};

using InputTangents = PerGradient<OptionalTensor>;  // none: zero

// The members of a struct that are tangents, as InputTangents; and set from them.
// `Forward` is the struct of the other tensors that the forward takes, FORWARD their list.
#define FA_TANGENT_ACCESS(Forward, FORWARD)                         \
  InputTangents tangents() const {                                  \
    InputTangents picked;                                           \
    picked.tie() = tie_but_first(0 FA_ATTENTION_TANGENTS(FA_NAME)); \
    return picked;                                                  \
  }                                                                 \
  void set_tangents(const InputTangents& from) {                    \
    tie_but_first(0 FA_ATTENTION_TANGENTS(FA_NAME)) = from.tie();   \
  }                                                                 \
  Forward forward() const { FA_PICK(Forward, FORWARD) }             \
  void set_forward(const Forward& forward) { FA_SET(forward, FORWARD) }

struct AttentionJvpTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_JVP_TENSORS)
  FA_TANGENT_ACCESS(AttentionTensors, FA_ATTENTION_TENSORS)
};
struct AttentionJvpResult {
  FA_ATTENTION_JVP_RESULT(FA_TENSOR_FIELD)
  FA_MEMBERS(FA_ATTENTION_JVP_RESULT)
};
struct AttentionJvp {
  static constexpr const char* kName = "attention_jvp";
  static std::string results() { return "(Tensor out, Tensor lse, Tensor tangent_out, Tensor tangent_lse)"; }
  using Tensors = AttentionJvpTensors;
  using Options = AttentionOptions;
  using Result = AttentionJvpResult;
};

struct AttentionDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_DOUBLE_BACKWARD_TENSORS)
  FA_TANGENT_ACCESS(AttentionTensors, FA_ATTENTION_TENSORS)
  AttentionBackwardTensors backward() const {
    AttentionBackwardTensors picked;
    picked.set_forward(forward());
    picked.grad_out = grad_out;
    picked.grad_lse = grad_lse;
    picked.out = out;
    picked.lse = lse;
    return picked;
  }
};
struct AttentionDoubleBackward {
  static constexpr const char* kName = "attention_double_backward";
  static std::string results() { return tensor_list(kGradients); }
  using Tensors = AttentionDoubleBackwardTensors;
  using Options = AttentionBackwardOptions;
  using Result = Gradients;
};

// The type of lse and of every accumulator.
inline at::ScalarType accumulate_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace flash_attn_ext
