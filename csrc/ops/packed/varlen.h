// Declares attention of packed sequences of different lengths, with the rows of dense/attention.h.
//
//   attention_varlen            forward; differentiable
//   attention_varlen_backward   the gradients of attention_varlen
//   attention_varlen_jvp, attention_varlen_double_backward   as attention_jvp and attention_double_backward
//
// Sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of query, and of key and value the rows of
// cu_seqlens_k. Each sequence attends to itself only. Letters as in dense/attention.h; B counts sequences, T_q and T_k
// count rows.
#pragma once

#include "../dense/attention.h"

namespace flash_attn_ext {

constexpr Shape kOffsetsShape{Shape::kExact, 1, {Dim::kOffsets}};
constexpr Shape kLengthsShape{Shape::kPerSequence};
// A mask has one of two shapes:
//   (B, H, max_seqlen_q, max_seqlen_k), with rows and columns from each sequence's start. Each size may be 1.
//   (H, T_q, max_seqlen_k), with the rows of query. The first and the last size may be 1.
constexpr Shape kPackedMaskShape{Shape::kPackedMask};

// The shape of packed rows: (B, H, S, D) becomes (T, H, D), and (B, H, S_q) becomes (H, T_q).
constexpr Shape packed_shape(const Shape& dense) {
  if (dense.kind == Shape::kBroadcast) return kPackedMaskShape;
  if (dense.kind != Shape::kExact || dense.dims[0] != Dim::kBatch) return dense;
  if (dense.count == 3) return {Shape::kExact, 2, {dense.dims[1], Dim::kTotalQ}};
  const Dim rows = dense.dims[2] == Dim::kSeqlenQ ? Dim::kTotalQ : Dim::kTotalK;
  return {Shape::kExact, 3, {rows, dense.dims[1], dense.dims[3]}};
}
constexpr TensorRule packed_rule(TensorRule rule) {
  rule.shape = packed_shape(rule.shape);
  rule.vmap = VmapRule::kLoop;
  return rule;
}

// clang-format off
//   name          type            shape              dtype      autocast        vmap
#define FA_PACKED_ROWS(X)                                                                           \
  /* Ascending, from 0 to T_q and T_k. */                                                           \
  X(cu_seqlens_q,  at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)             \
  X(cu_seqlens_k,  at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)             \
  /* Number of rows of each sequence that exist; none: all. Results of the other rows are 0, their */ \
  /* lse is -inf. */                                                                                \
  X(seqused_q,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  X(seqused_k,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)

#define FA_VARLEN_TENSORS(X) \
  FA_DIFFERENTIABLE(X)       \
  FA_PACKED_ROWS(X)          \
  FA_RNG_STATE_ROW(X)
#define FA_VARLEN_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                    \
  FA_VARLEN_TENSORS(X)                \
  FA_RESULTS(X)
#define FA_VARLEN_JVP_TENSORS(X) \
  FA_TANGENTS(X)                 \
  FA_VARLEN_TENSORS(X)
#define FA_VARLEN_DOUBLE_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                           \
  FA_VARLEN_JVP_TENSORS(X)                   \
  FA_RESULTS(X)                              \
  FA_RESULT_TANGENTS(X)

#define FA_MAX_SEQLEN_Q_OPTION(X)                                                                                   \
  /* At least the length of the longest sequence; none: T_q. */                                                     \
  X(max_seqlen_q,   std::optional<c10::SymInt>, std::nullopt, !v || *v >= 0,                "0 or more")
#define FA_MAX_SEQLEN_OPTIONS(X)                                                                                    \
  FA_MAX_SEQLEN_Q_OPTION(X)                                                                                         \
  X(max_seqlen_k,   std::optional<c10::SymInt>, std::nullopt, !v || *v >= 0,                "0 or more")
#define FA_VARLEN_OPTIONS(X) \
  FA_ATTENTION_OPTIONS(X)    \
  FA_MAX_SEQLEN_OPTIONS(X)
#define FA_VARLEN_BACKWARD_OPTIONS(X) \
  FA_VARLEN_OPTIONS(X)                \
  FA_GRAD_MASK_OPTION(X)
// clang-format on

// attention() returns the options of attention, set_attention() assigns them.
#define FA_ATTENTION_OPTIONS_ACCESS()                                                    \
  AttentionOptions attention() const { FA_PICK(AttentionOptions, FA_ATTENTION_OPTIONS) } \
  void set_attention(const AttentionOptions& given) { FA_SET(FA_ATTENTION_OPTIONS) }

struct VarlenTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_TENSORS, packed_rule)
};
struct VarlenOptions {
  FA_OPTION_FIELDS(FA_VARLEN_OPTIONS)
  FA_ATTENTION_OPTIONS_ACCESS()
};
// out (T_q, H, D_v), lse (H, T_q)
struct AttentionVarlen : OperatorTypes<VarlenTensors, VarlenOptions, AttentionResult, AttentionParams> {
  static constexpr const char* kName = "attention_varlen";
  static constexpr bool kIsUnboxed = true;
  FA_OPERATOR_STEPS(AttentionVarlen)
};

struct VarlenBackwardTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_BACKWARD_TENSORS, packed_rule)
  FA_FORWARD_ACCESS(VarlenTensors, FA_VARLEN_TENSORS)
};
struct VarlenBackwardOptions {
  FA_OPTION_FIELDS(FA_VARLEN_BACKWARD_OPTIONS)
  FA_FORWARD_ACCESS(VarlenOptions, FA_VARLEN_OPTIONS)
};
struct AttentionVarlenBackward
    : OperatorTypes<VarlenBackwardTensors, VarlenBackwardOptions, Gradients, BackwardParams> {
  static constexpr const char* kName = "attention_varlen_backward";
  static constexpr bool kIsUnboxed = true;
  FA_OPERATOR_STEPS(AttentionVarlenBackward)
};

struct VarlenJvpTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_JVP_TENSORS, packed_rule)
  FA_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(VarlenTensors, FA_VARLEN_TENSORS)
};
// out and its tangent (T_q, H, D_v), lse and its tangent (H, T_q)
struct AttentionVarlenJvp : OperatorTypes<VarlenJvpTensors, VarlenOptions, AttentionJvpResult, JvpParams> {
  static constexpr const char* kName = "attention_varlen_jvp";
  FA_OPERATOR_STEPS(AttentionVarlenJvp)
};

struct VarlenDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_DOUBLE_BACKWARD_TENSORS, packed_rule)
  FA_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(VarlenTensors, FA_VARLEN_TENSORS)
  FA_BACKWARD_ACCESS(VarlenBackwardTensors, FA_VARLEN_BACKWARD_TENSORS)
};
struct AttentionVarlenDoubleBackward
    : OperatorTypes<VarlenDoubleBackwardTensors, VarlenBackwardOptions, Gradients, DoubleBackwardParams> {
  static constexpr const char* kName = "attention_varlen_double_backward";
  FA_OPERATOR_STEPS(AttentionVarlenDoubleBackward)
};

}  // namespace flash_attn_ext
