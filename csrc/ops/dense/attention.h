// Declares attention of dense tensors, (B, H, S, D). One row declares one tensor or one option. The operators on packed
// sequences (packed/), caches (cache/) and attention weights (weights/) use the same rows.
//
//   attention            forward; differentiable
//   attention_backward   the gradients of attention; autograd calls it, and torch.compile traces it
//   attention_jvp        forward mode: the results of attention and their tangents; differentiable
//   attention_double_backward   the gradient of <results of attention_jvp, grad_out and grad_lse>. It equals the gradient
//                        of <results of attention_backward, tangents>. No other second derivative is necessary:
//                        docs/derivative_formulas.md
//
// Letters: B batch, H query heads, H_kv key/value heads, S_q and S_k sequence lengths. D is the head dimension of query
// and key, D_v of value and out. declarations/ defines the words of a row and makes schemas from rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>

#include "../../core/params.h"
#include "../declarations/signature.h"

namespace flash_attn_ext {

constexpr int64_t kMaxHeadDim = 1024;

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
// The tensors with a gradient, in the order of attention_backward's results. ROW is FA_SAME, or FA_AS_TANGENT for the
// row of the tensor's tangent.
//           name          type            shape          dtype      autocast        vmap
#define FA_QUERY_AND_KEY_ROWS(ROW, X)                                                               \
  ROW(X,     query,        at::Tensor,     kQueryShape,   kFloating, kCast,          kBatch)        \
  ROW(X,     key,          at::Tensor,     kKeyShape,     kOfQuery,  kCast,          kBatch)
#define FA_VALUE_ROW(ROW, X)                                                                        \
  ROW(X,     value,        at::Tensor,     kValueShape,   kOfQuery,  kCast,          kBatch)
#define FA_MASK_ROW(ROW, X)                                                                         \
  /* bool: true attends. Float: added to the scores. */                                             \
  ROW(X,     attn_mask,    OptionalTensor, kMaskShape,    kMask,     kUnlessFloat32, kBatchOrOne)
#define FA_PER_HEAD_ROWS(ROW, X)                                                                    \
  /* The scores get -slope * |i + diagonal - j|. */                                                 \
  ROW(X,     alibi_slopes, OptionalTensor, kPerHeadShape, kAdded,    kUnlessFloat32, kPerHead)      \
  /* One more column of the softmax: a score without a value. */                                    \
  ROW(X,     sink,         OptionalTensor, kPerHeadShape, kAdded,    kUnlessFloat32, kPerHead)

// The tensors without a gradient.
#define FA_RNG_STATE_ROW(X)                                                                         \
  /* {seed, offset} of dropout, on query's device; required if dropout_p > 0. A part of a larger */ \
  /* call adds {row, column, head, heads}: DropoutParams. */                                        \
  X(         rng_state,    OptionalTensor, kRngStateShape, kInt64,   kKeep,          kLoop)
#define FA_KEY_MASK_ROW(X)                                                                          \
  /* A second mask, bool or float as attn_mask: one element for each key. */                        \
  X(         key_mask,     OptionalTensor, kKeyMaskShape, kMask,     kUnlessFloat32, kBatch)

// The tensors that derivatives add. All are passed by autograd, in the types of the forward.
#define FA_COTANGENTS(X)                                                                            \
  X(         grad_out,     OptionalTensor, kOutShape,     kOfQuery,     kKeep,       kBatch)        \
  X(         grad_lse,     OptionalTensor, kLseShape,     kAccumulator, kKeep,       kBatch)
#define FA_RESULTS(X)                                                                               \
  X(         out,          at::Tensor,     kOutShape,     kOfQuery,     kKeep,       kBatch)        \
  X(         lse,          at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)
#define FA_RESULT_TANGENTS(X)                                                                       \
  X(         tangent_out,  at::Tensor,     kOutShape,     kOfQuery,     kKeep,       kBatch)        \
  X(         tangent_lse,  at::Tensor,     kLseShape,     kAccumulator, kKeep,       kBatch)
// clang-format on

// The row of the tangent of a tensor. A tangent has the tensor's shape; a bool mask has no tangent.
#define FA_AS_TANGENT(X, name, type, shape, dtype, autocast, vmap) \
  X(tangent_##name, OptionalTensor, shape, FA_TANGENT_OF_##dtype, kKeep, vmap)
#define FA_TANGENT_OF_kFloating kOfQuery
#define FA_TANGENT_OF_kOfQuery kOfQuery
#define FA_TANGENT_OF_kMask kAdded
#define FA_TANGENT_OF_kAdded kAdded

#define FA_DIFFERENTIABLE_ROWS(ROW, X) \
  FA_QUERY_AND_KEY_ROWS(ROW, X)        \
  FA_VALUE_ROW(ROW, X)                 \
  FA_MASK_ROW(ROW, X)                  \
  FA_PER_HEAD_ROWS(ROW, X)
#define FA_DIFFERENTIABLE(X) FA_DIFFERENTIABLE_ROWS(FA_SAME, X)
#define FA_TANGENTS(X) FA_DIFFERENTIABLE_ROWS(FA_AS_TANGENT, X)
#define FA_PER_HEAD(X) FA_PER_HEAD_ROWS(FA_SAME, X)

#define FA_WITHOUT_GRADIENT(X) \
  FA_RNG_STATE_ROW(X)          \
  FA_KEY_MASK_ROW(X)

#define FA_ATTENTION_TENSORS(X) \
  FA_DIFFERENTIABLE(X)          \
  FA_WITHOUT_GRADIENT(X)
#define FA_ATTENTION_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                       \
  FA_ATTENTION_TENSORS(X)                \
  FA_RESULTS(X)
#define FA_ATTENTION_JVP_TENSORS(X) \
  FA_TANGENTS(X)                    \
  FA_ATTENTION_TENSORS(X)
#define FA_ATTENTION_DOUBLE_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                              \
  FA_ATTENTION_JVP_TENSORS(X)                   \
  FA_RESULTS(X)                                 \
  FA_RESULT_TANGENTS(X)

// clang-format off
// The options. An int that a caller may change from call to call is a SymInt: torch.compile then keeps it dynamic.
//   name           type                       default       check, of the value v             allowed values
#define FA_ATTENTION_OPTIONS(X)                                                                                     \
  FA_SCORE_OPTIONS(X)                                                                                               \
  /* Number of pieces of the keys, for few queries; 0: chosen by the shape. Forward only. */                        \
  X(num_splits,     c10::SymInt,                0,            v >= 0,                "0 (chosen by the shape) or more") \
  /* FlashDecoding++'s constant, used instead of the running maximum. Forward only. */                              \
  X(unified_max,    std::optional<double>,      std::nullopt, !v || std::isfinite(*v),          "a finite number")  \
  /* Same bits at every run; on CPU always so. Backward only. */                                                    \
  X(deterministic,  bool,                       false,        true,                             "")

#define FA_SCORE_OPTIONS_BEFORE_DROPOUT(X)                                                                          \
  /* Factor of <q, k>; none: 1 / sqrt(D). */                                                                        \
  X(scale,          std::optional<double>,      std::nullopt, !v || std::isfinite(*v),          "a finite number")  \
  X(causal,         bool,                       false,        true,                             "")                 \
  /* The corner in which the diagonal ends if S_q != S_k: false upper-left, true lower-right. */                    \
  X(lower_right,    bool,                       false,        true,                             "")                 \
  /* Shift of the diagonal, for a part of a larger score matrix. */                                                 \
  X(diagonal,       c10::SymInt,                0,            true,                             "")                 \
  /* Key j is visible to query i if -window_left <= j - (i + diagonal) <= window_right; none: no limit. */          \
  X(window_left,    std::optional<c10::SymInt>, std::nullopt, true,                             "")                 \
  X(window_right,   std::optional<c10::SymInt>, std::nullopt, true,                             "")                 \
  /* Above 0: query i sees only keys in the chunk of key i + diagonal. Chunks have this many keys.*/                 \
  X(attention_chunk, c10::SymInt,               0,            v >= 0,                "0 (off) or more")             \
  /* Number of key 0 in the larger score matrix that has these chunks. */                                           \
  X(first_key,      c10::SymInt,                0,            true,                             "")                 \
  X(softcap,        double,                     0.0,          std::isfinite(v) && v >= 0,                           \
    "0 (none) or a positive finite number")

#define FA_SCORE_OPTIONS(X)                                                                                         \
  FA_SCORE_OPTIONS_BEFORE_DROPOUT(X)                                                                                \
  X(dropout_p,      double,                     0.0,          v >= 0.0 && v <= 1.0,             "0 to 1")

#define FA_GRAD_MASK_OPTION(X)                                                                                      \
  /* The gradients to compute; the other gradients are returned undefined. */                                       \
  X(grad_mask,      GradFlags,                  {},           true,                             "")

#define FA_ATTENTION_BACKWARD_OPTIONS(X) \
  FA_ATTENTION_OPTIONS(X)                \
  FA_GRAD_MASK_OPTION(X)

#define FA_ATTENTION_RESULT(X)                                                                  \
  X(out,           at::Tensor)  /* (B, H, S_q, D_v), query's dtype */                           \
  X(lse,           at::Tensor)  /* (B, H, S_q), the accumulators' type */

#define FA_ATTENTION_JVP_RESULT(X)                                                              \
  FA_ATTENTION_RESULT(X)                                                                        \
  X(tangent_out,   at::Tensor)                                                                  \
  X(tangent_lse,   at::Tensor)
// clang-format on

// One value for each tensor of a list, by name.
#define FA_VALUE_FIELD(name, ...) Value name{};
#define FA_VALUE_TYPE(name, ...) , Value
#define FA_VALUE_FIELDS(LIST)                                                     \
  LIST(FA_VALUE_FIELD)                                                            \
  using MemberTypes = decltype(without_first(Types<void LIST(FA_VALUE_TYPE)>{})); \
  FA_WITH_MEMBERS(LIST)                                                           \
  static constexpr const char* kNames[] = {LIST(FA_QUOTED_NAME)};                 \
  static constexpr size_t kCount = std::size(kNames);                             \
  static std::string schema() { return tensor_list(kCount); }
template <class Value>
struct PerGradient {
  FA_VALUE_FIELDS(FA_DIFFERENTIABLE)
};
template <class Value>
struct PerHead {
  FA_VALUE_FIELDS(FA_PER_HEAD)
};
constexpr size_t kGradients = std::size(PerGradient<bool>::kNames);

using Gradients = PerGradient<at::Tensor>;          // undefined: not computed
using InputTangents = PerGradient<OptionalTensor>;  // none: zero
using GradFlags = std::array<bool, kGradients>;     // the form that the dispatcher passes
struct GradMask : PerGradient<bool> {
  GradMask() = default;
  explicit GradMask(const GradFlags& flags) {
    auto flag = flags.begin();
    with_members([&](auto&... member) { ((member = *flag++), ...); });
  }
  GradFlags flags() const {
    return with_members([](auto... flag) { return GradFlags{flag...}; });
  }
};

// The params of an operator, and the tensors that they point into. The struct must outlive the kernels' run.
template <class Op>
struct Packed {
  typename Op::Tensors tensors;  // in the kernels' layout: dense/pack_params.h
  PerHead<at::Tensor> per_head;  // (B, H) parts of a per-head gradient; undefined: not computed
  typename Op::Params params;
};

// An operator Op is a struct with OperatorTypes, kName and FA_OPERATOR_STEPS. operators.h lists all operators; the dispatch keys, explain and the tests call
//
//   Op::check(tensors, options)         throws TypeError (dtype, device) or ValueError; reads no elements
//   Op::empty(tensors, options)         allocates the results; also for tensors without data
//   Op::pack(tensors, options, result)  converts to the kernels' params
//
// and a device's run(params), which writes the result.
template <class Tensors_, class Options_, class Result_, class Params_>
struct OperatorTypes {
  using Tensors = Tensors_;
  using Options = Options_;
  using Result = Result_;
  using Params = Params_;
};
#define FA_OPERATOR_STEPS(Op)                                          \
  static void check(const Tensors& tensors, const Options& options);   \
  static Result empty(const Tensors& tensors, const Options& options); \
  static Packed<Op> pack(const Tensors& tensors, const Options& options, const Result& result);

struct AttentionTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_TENSORS, same_rule)
};
struct AttentionOptions {
  FA_OPTION_FIELDS(FA_ATTENTION_OPTIONS)
};
struct AttentionResult {
  FA_RESULT_FIELDS(FA_ATTENTION_RESULT)
};
struct Attention : OperatorTypes<AttentionTensors, AttentionOptions, AttentionResult, AttentionParams> {
  static constexpr const char* kName = "attention";
  static constexpr bool kIsUnboxed = true;
  FA_OPERATOR_STEPS(Attention)
};

// forward() returns the members of the forward, set_forward() assigns them. FORWARD is the forward's list.
#define FA_FORWARD_ACCESS(Forward, FORWARD)             \
  Forward forward() const { FA_PICK(Forward, FORWARD) } \
  void set_forward(const Forward& given) { FA_SET(FORWARD) }

// The same for the tangents of the inputs.
#define FA_TANGENT_TO_PICKED(X, name, ...) picked.name = tangent_##name;
#define FA_TANGENT_FROM_GIVEN(X, name, ...) tangent_##name = given.name;
#define FA_TANGENT_ACCESS_OF(Tangents, ROWS) \
  Tangents tangents() const {                \
    Tangents picked;                         \
    ROWS(FA_TANGENT_TO_PICKED, )             \
    return picked;                           \
  }                                          \
  void set_tangents(const Tangents& given) { ROWS(FA_TANGENT_FROM_GIVEN, ) }
#define FA_TANGENT_ACCESS() FA_TANGENT_ACCESS_OF(InputTangents, FA_DIFFERENTIABLE_ROWS)

// The same for the backward, in a double backward.
#define FA_BACKWARD_ACCESS(Backward, BACKWARD)              \
  Backward backward() const { FA_PICK(Backward, BACKWARD) } \
  void set_backward(const Backward& given) { FA_SET(BACKWARD) }

struct AttentionBackwardTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_BACKWARD_TENSORS, same_rule)
  FA_FORWARD_ACCESS(AttentionTensors, FA_ATTENTION_TENSORS)
};
struct AttentionBackwardOptions {
  FA_OPTION_FIELDS(FA_ATTENTION_BACKWARD_OPTIONS)
  FA_FORWARD_ACCESS(AttentionOptions, FA_ATTENTION_OPTIONS)
};
struct AttentionBackward
    : OperatorTypes<AttentionBackwardTensors, AttentionBackwardOptions, Gradients, BackwardParams> {
  static constexpr const char* kName = "attention_backward";
  static constexpr bool kIsUnboxed = true;
  FA_OPERATOR_STEPS(AttentionBackward)
};

struct AttentionJvpTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_JVP_TENSORS, same_rule)
  FA_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(AttentionTensors, FA_ATTENTION_TENSORS)
};
struct AttentionJvpResult {
  FA_RESULT_FIELDS(FA_ATTENTION_JVP_RESULT)
};
struct AttentionJvp : OperatorTypes<AttentionJvpTensors, AttentionOptions, AttentionJvpResult, JvpParams> {
  static constexpr const char* kName = "attention_jvp";
  FA_OPERATOR_STEPS(AttentionJvp)
};

struct AttentionDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_ATTENTION_DOUBLE_BACKWARD_TENSORS, same_rule)
  FA_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(AttentionTensors, FA_ATTENTION_TENSORS)
  FA_BACKWARD_ACCESS(AttentionBackwardTensors, FA_ATTENTION_BACKWARD_TENSORS)
};
struct AttentionDoubleBackward : OperatorTypes<AttentionDoubleBackwardTensors, AttentionBackwardOptions,
                                               Gradients, DoubleBackwardParams> {
  static constexpr const char* kName = "attention_double_backward";
  FA_OPERATOR_STEPS(AttentionDoubleBackward)
};

// The type of lse and of every accumulator.
inline at::ScalarType accumulate_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace flash_attn_ext
