// The operators on packed sequences of different lengths, declared as in ops.h.
//
//   attention_varlen            forward; differentiable
//   attention_varlen_backward   its gradients
//   attention_varlen_jvp, attention_varlen_double_backward   as attention_jvp and attention_double_backward
//
// Rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of query are those of sequence b, and so are those of key and value by
// cu_seqlens_k. Each sequence attends to itself alone. Letters as in ops.h; B counts sequences, T_q and T_k rows.
#pragma once

#include "ops.h"
#include "pack_params.h"

namespace flash_attn_ext {

constexpr Shape kPackedQueryShape{Shape::kExact, 3, {Dim::kTotalQ, Dim::kHeads, Dim::kHeadDim}};
constexpr Shape kPackedKeyShape{Shape::kExact, 3, {Dim::kTotalK, Dim::kHeadsKv, Dim::kHeadDim}};
constexpr Shape kPackedValueShape{Shape::kExact, 3, {Dim::kTotalK, Dim::kHeadsKv, Dim::kHeadDimV}};
constexpr Shape kPackedOutShape{Shape::kExact, 3, {Dim::kTotalQ, Dim::kHeads, Dim::kHeadDimV}};
constexpr Shape kPackedLseShape{Shape::kExact, 2, {Dim::kHeads, Dim::kTotalQ}};
constexpr Shape kOffsetsShape{Shape::kExact, 1, {Dim::kOffsets}};
constexpr Shape kLengthsShape{Shape::kPerSequence};
// Either (B, H, max_seqlen_q, max_seqlen_k), counted from each sequence's start, each size 1 or the full one; or
// (H, T_q, max_seqlen_k), whose rows are those of query and which may be 1 in the first and last dimension.
constexpr Shape kPackedMaskShape{Shape::kPackedMask};

// clang-format off
// Tensors with a gradient have the names of attention's: PerGradient serves both.
//   name          type            shape              dtype      autocast        vmap
#define FA_VARLEN_TENSORS(X)                                                                        \
  X(query,         at::Tensor,     kPackedQueryShape, kFloating, kCast,          kLoop)             \
  X(key,           at::Tensor,     kPackedKeyShape,   kOfQuery,  kCast,          kLoop)             \
  X(value,         at::Tensor,     kPackedValueShape, kOfQuery,  kCast,          kLoop)             \
  X(attn_mask,     OptionalTensor, kPackedMaskShape,  kMask,     kUnlessFloat32, kLoop)             \
  X(alibi_slopes,  OptionalTensor, kPerHeadShape,     kAdded,    kUnlessFloat32, kLoop)             \
  X(sink,          OptionalTensor, kPerHeadShape,     kAdded,    kUnlessFloat32, kLoop)             \
  /* Ascending, from 0 to T_q and T_k. */                                                           \
  X(cu_seqlens_q,  at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)             \
  X(cu_seqlens_k,  at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)             \
  /* How many rows of each sequence are in use; none: all. Results for others are 0, their lse -inf. */ \
  X(seqused_q,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  X(seqused_k,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  X(rng_state,     OptionalTensor, kRngStateShape,    kInt64,    kKeep,          kLoop)

#define FA_VARLEN_OPTIONS(X)                                                                                     \
  FA_ATTENTION_OPTIONS(X)                                                                                        \
  /* At least as long as the longest sequence; none: T_q, T_k. */                                                \
  X(max_seqlen_q,   std::optional<c10::SymInt>, std::nullopt, !v || *v >= 0,                "0 or more")         \
  X(max_seqlen_k,   std::optional<c10::SymInt>, std::nullopt, !v || *v >= 0,                "0 or more")

#define FA_VARLEN_BACKWARD_TENSORS(X)                                                               \
  X(grad_out,      OptionalTensor, kPackedOutShape,   kOfQuery,     kKeep,       kLoop)             \
  X(grad_lse,      OptionalTensor, kPackedLseShape,   kAccumulator, kKeep,       kLoop)             \
  FA_VARLEN_TENSORS(X)                                                                              \
  X(out,           at::Tensor,     kPackedOutShape,   kOfQuery,     kKeep,       kLoop)             \
  X(lse,           at::Tensor,     kPackedLseShape,   kAccumulator, kKeep,       kLoop)

// The names are those of FA_ATTENTION_TANGENTS.
#define FA_VARLEN_TANGENTS(X)                                                                       \
  X(tangent_query,        OptionalTensor, kPackedQueryShape, kOfQuery, kKeep, kLoop)                \
  X(tangent_key,          OptionalTensor, kPackedKeyShape,   kOfQuery, kKeep, kLoop)                \
  X(tangent_value,        OptionalTensor, kPackedValueShape, kOfQuery, kKeep, kLoop)                \
  X(tangent_attn_mask,    OptionalTensor, kPackedMaskShape,  kAdded,   kKeep, kLoop)                \
  X(tangent_alibi_slopes, OptionalTensor, kPerHeadShape,     kAdded,   kKeep, kLoop)                \
  X(tangent_sink,         OptionalTensor, kPerHeadShape,     kAdded,   kKeep, kLoop)

#define FA_VARLEN_JVP_TENSORS(X)                                                                    \
  FA_VARLEN_TANGENTS(X)                                                                             \
  FA_VARLEN_TENSORS(X)

#define FA_VARLEN_DOUBLE_BACKWARD_TENSORS(X)                                                        \
  X(grad_out,      OptionalTensor, kPackedOutShape,   kOfQuery,     kKeep,       kLoop)             \
  X(grad_lse,      OptionalTensor, kPackedLseShape,   kAccumulator, kKeep,       kLoop)             \
  FA_VARLEN_JVP_TENSORS(X)                                                                          \
  X(out,           at::Tensor,     kPackedOutShape,   kOfQuery,     kKeep,       kLoop)             \
  X(lse,           at::Tensor,     kPackedLseShape,   kAccumulator, kKeep,       kLoop)             \
  X(tangent_out,   at::Tensor,     kPackedOutShape,   kOfQuery,     kKeep,       kLoop)             \
  X(tangent_lse,   at::Tensor,     kPackedLseShape,   kAccumulator, kKeep,       kLoop)

#define FA_VARLEN_BACKWARD_OPTIONS(X)                                                                            \
  FA_VARLEN_OPTIONS(X)                                                                                           \
  X(grad_mask,      GradFlags,                  {},           true,                         "")
// clang-format on

struct VarlenTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_TENSORS)
};
struct VarlenOptions {
  FA_OPTION_FIELDS(FA_VARLEN_OPTIONS)
  AttentionOptions attention() const { FA_PICK(AttentionOptions, FA_ATTENTION_OPTIONS) }
  void set_attention(const AttentionOptions& attention) { FA_SET(attention, FA_ATTENTION_OPTIONS) }
};
struct AttentionVarlen {
  static constexpr const char* kName = "attention_varlen";
  static std::string results() { return "(Tensor out, Tensor lse)"; }
  using Tensors = VarlenTensors;
  using Options = VarlenOptions;
  using Result = AttentionResult;  // out (T_q, H, D_v), lse (H, T_q)
};

struct VarlenBackwardTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_BACKWARD_TENSORS)
  VarlenTensors forward() const { FA_PICK(VarlenTensors, FA_VARLEN_TENSORS) }
  void set_forward(const VarlenTensors& forward) { FA_SET(forward, FA_VARLEN_TENSORS) }
};
struct VarlenBackwardOptions {
  FA_OPTION_FIELDS(FA_VARLEN_BACKWARD_OPTIONS)
  VarlenOptions forward() const { FA_PICK(VarlenOptions, FA_VARLEN_OPTIONS) }
  void set_forward(const VarlenOptions& forward) { FA_SET(forward, FA_VARLEN_OPTIONS) }
};
struct AttentionVarlenBackward {
  static constexpr const char* kName = "attention_varlen_backward";
  static std::string results() { return tensor_list(kGradients); }
  using Tensors = VarlenBackwardTensors;
  using Options = VarlenBackwardOptions;
  using Result = Gradients;
};

struct VarlenJvpTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_JVP_TENSORS)
  FA_TANGENT_ACCESS(VarlenTensors, FA_VARLEN_TENSORS)
};
struct AttentionVarlenJvp {
  static constexpr const char* kName = "attention_varlen_jvp";
  static std::string results() { return AttentionJvp::results(); }
  using Tensors = VarlenJvpTensors;
  using Options = VarlenOptions;
  using Result = AttentionJvpResult;  // out and its tangent (T_q, H, D_v), lse and its tangent (H, T_q)
};

struct VarlenDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_DOUBLE_BACKWARD_TENSORS)
  FA_TANGENT_ACCESS(VarlenTensors, FA_VARLEN_TENSORS)
  VarlenBackwardTensors backward() const {
    VarlenBackwardTensors picked;
    picked.set_forward(forward());
    picked.grad_out = grad_out;
    picked.grad_lse = grad_lse;
    picked.out = out;
    picked.lse = lse;
    return picked;
  }
};
struct AttentionVarlenDoubleBackward {
  static constexpr const char* kName = "attention_varlen_double_backward";
  static std::string results() { return tensor_list(kGradients); }
  using Tensors = VarlenDoubleBackwardTensors;
  using Options = VarlenBackwardOptions;
  using Result = Gradients;
};

// As for attention: checks.h. On CPU the offsets are read too; on CUDA nobody waits for them, and kernels keep inside
// the tensors whatever they are.
void check_varlen(const VarlenTensors& tensors, const VarlenOptions& options);
void check_varlen_backward(const VarlenBackwardTensors& tensors, const VarlenBackwardOptions& options);
void check_varlen_jvp(const VarlenJvpTensors& tensors, const VarlenOptions& options);
void check_varlen_double_backward(const VarlenDoubleBackwardTensors& tensors,
                                  const VarlenBackwardOptions& options);

// As for attention: outputs.h. Where rows may be out of use, everything is filled as their results are.
AttentionResult empty_varlen_result(const VarlenTensors& in);
AttentionJvpResult empty_varlen_jvp_result(const VarlenTensors& in);
Gradients empty_varlen_gradients(const VarlenTensors& in, const GradMask& wanted);

// As for attention: pack_params.h. The params point into the other members.
VarlenTensors to_kernel_layout(const VarlenTensors& given);
struct PackedVarlen {
  VarlenTensors tensors;
  AttentionParams params;
};
PackedVarlen pack_varlen(const VarlenTensors& given, const VarlenOptions& options,
                         const AttentionResult& result);

struct PackedVarlenBackward {
  VarlenTensors tensors;
  PackedBackward packed;
};
PackedVarlenBackward pack_varlen_backward(const VarlenBackwardTensors& given,
                                          const VarlenBackwardOptions& options, const Gradients& result);

struct PackedVarlenJvp {
  VarlenTensors tensors;
  PackedJvp packed;
};
PackedVarlenJvp pack_varlen_jvp(const VarlenJvpTensors& given, const VarlenOptions& options,
                                const AttentionJvpResult& result);

struct PackedVarlenDoubleBackward {
  VarlenTensors tensors;
  PackedDoubleBackward packed;
};
PackedVarlenDoubleBackward pack_varlen_double_backward(const VarlenDoubleBackwardTensors& given,
                                                       const VarlenBackwardOptions& options,
                                                       const Gradients& result);

}  // namespace flash_attn_ext
