// Attention with functions of the user (core/program.h), with the rows of dense/attention.h, packed/varlen.h and
// cache/kvcache.h.
//
//   attention_flex          dense tensors. Its derivatives: attention_flex_backward, _jvp and _double_backward
//   attention_varlen_flex   packed sequences; likewise
//   attention_cache_flex    caches; forward only
//
// Each operator has a base, the operator without functions, and adds the rows of FA_FUNCTION_TENSORS to it. They are
// separate operators, so that attention's schema, its calls of 5 us, and its rules for torch.func and torch.vmap do not
// depend on programs. The kernels of jvp and double backward are written in Python: flash_attn_ext/flex/derivatives.py.
#pragma once

#include <memory>

#include "../../core/program.h"
#include "../cache/kvcache.h"
#include "../packed/varlen.h"

namespace flash_attn_ext {

constexpr Shape kProgramDataShape{Shape::kCheckedByOperator};

// clang-format off
//   name           type            shape              dtype                autocast  vmap
#define FA_CAPTURED_ROW(ROW, X)                                                                            \
  /* (N), the accumulators' type: elements that score functions read. */                                   \
  ROW(X, captured, OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)
#define FA_PROGRAM_ROWS(X)                                                                                 \
  /* (N), int32, and int64 for float64 inputs: integers that functions read. */                            \
  X(captured_ints, OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)                    \
  /* (B or 1, H or 1, rows, columns), uint8: BlockStates. For a cache, row 0 is for queries below 0. */     \
  X(block_states,  OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)                    \
  /* (N), int64: where the programs of score, gradient, captured gradient and mask begin, or -1; programs. */ \
  X(programs,      OptionalTensor, kProgramDataShape, kCheckedByOperator, kKeep, kLoop)
#define FA_FUNCTION_TENSORS(X)  \
  FA_CAPTURED_ROW(FA_SAME, X)   \
  FA_PROGRAM_ROWS(X)

#define FA_FLEX_DIFFERENTIABLE_ROWS(ROW, X) \
  FA_DIFFERENTIABLE_ROWS(ROW, X)            \
  FA_CAPTURED_ROW(ROW, X)
#define FA_FLEX_DIFFERENTIABLE(X) FA_FLEX_DIFFERENTIABLE_ROWS(FA_SAME, X)
#define FA_FLEX_TANGENTS(X) FA_FLEX_DIFFERENTIABLE_ROWS(FA_AS_TANGENT, X)
#define FA_TANGENT_OF_kCheckedByOperator kCheckedByOperator

#define FA_FUNCTION_OPTIONS(X)                                                                                     \
  /* Queries and keys of a block of block_states. */                                                               \
  X(block_size_q,   int64_t,                128,          v >= 1,                           "1 or more")           \
  X(block_size_k,   int64_t,                128,          v >= 1,                           "1 or more")
#define FA_FLEX_GRAD_MASK_OPTION(X)                                                                                \
  /* As grad_mask of attention_backward, with captured at the end. */                                              \
  X(grad_mask,      FlexGradFlags,          {},           true,                             "")
// clang-format on

// Lists of tensors: dense, then packed, then caches.
#define FA_FLEX_TENSORS(X)  \
  FA_FLEX_DIFFERENTIABLE(X) \
  FA_WITHOUT_GRADIENT(X)    \
  FA_PROGRAM_ROWS(X)
#define FA_FLEX_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                  \
  FA_FLEX_TENSORS(X)                \
  FA_RESULTS(X)
#define FA_FLEX_JVP_TENSORS(X) \
  FA_FLEX_TANGENTS(X)          \
  FA_FLEX_TENSORS(X)
#define FA_FLEX_DOUBLE_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                         \
  FA_FLEX_JVP_TENSORS(X)                   \
  FA_RESULTS(X)                            \
  FA_RESULT_TANGENTS(X)

#define FA_VARLEN_FLEX_TENSORS(X) \
  FA_FLEX_DIFFERENTIABLE(X)       \
  FA_PACKED_ROWS(X)               \
  FA_RNG_STATE_ROW(X)             \
  FA_PROGRAM_ROWS(X)
#define FA_VARLEN_FLEX_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                         \
  FA_VARLEN_FLEX_TENSORS(X)                \
  FA_RESULTS(X)
#define FA_VARLEN_FLEX_JVP_TENSORS(X) \
  FA_FLEX_TANGENTS(X)                 \
  FA_VARLEN_FLEX_TENSORS(X)
#define FA_VARLEN_FLEX_DOUBLE_BACKWARD_TENSORS(X) \
  FA_COTANGENTS(X)                                \
  FA_VARLEN_FLEX_JVP_TENSORS(X)                   \
  FA_RESULTS(X)                                   \
  FA_RESULT_TANGENTS(X)

#define FA_CACHE_FLEX_TENSORS(X) \
  FA_CACHE_TENSORS(X)            \
  FA_FUNCTION_TENSORS(X)

#define FA_FLEX_OPTIONS(X) \
  FA_ATTENTION_OPTIONS(X)  \
  FA_FUNCTION_OPTIONS(X)
#define FA_FLEX_BACKWARD_OPTIONS(X) \
  FA_FLEX_OPTIONS(X)                \
  FA_FLEX_GRAD_MASK_OPTION(X)
#define FA_VARLEN_FLEX_OPTIONS(X) \
  FA_VARLEN_OPTIONS(X)            \
  FA_FUNCTION_OPTIONS(X)
#define FA_VARLEN_FLEX_BACKWARD_OPTIONS(X) \
  FA_VARLEN_FLEX_OPTIONS(X)                \
  FA_FLEX_GRAD_MASK_OPTION(X)
#define FA_CACHE_FLEX_OPTIONS(X) \
  FA_CACHE_OPTIONS(X)            \
  FA_FUNCTION_OPTIONS(X)

// One value for each differentiable tensor.
template <class Value>
struct PerFlexGradient {
  FA_VALUE_FIELDS(FA_FLEX_DIFFERENTIABLE)
};
struct FlexGradients : PerFlexGradient<at::Tensor> {  // undefined where not wanted
  Gradients base() const { FA_PICK(Gradients, FA_DIFFERENTIABLE) }
  void set_base(const Gradients& given) { FA_SET(FA_DIFFERENTIABLE) }
};
using FlexInputTangents = PerFlexGradient<OptionalTensor>;
using FlexGradFlags = std::array<bool, FlexGradients::kCount>;

struct FunctionTensors {
  FA_TENSOR_FIELDS(FA_FUNCTION_TENSORS, same_rule)
};
struct FunctionOptions {
  FA_OPTION_FIELDS(FA_FUNCTION_OPTIONS)
};

// base(): the tensors or options of the operator without functions. functions(): the other tensors or options.
#define FA_BASE_TENSORS(Base, BASE)                                           \
  Base base() const {FA_PICK(Base, BASE)} FunctionTensors functions() const { \
    FA_PICK(FunctionTensors, FA_FUNCTION_TENSORS)                             \
  }
#define FA_BASE_OPTIONS(Base, BASE)                                           \
  Base base() const {FA_PICK(Base, BASE)} FunctionOptions functions() const { \
    FA_PICK(FunctionOptions, FA_FUNCTION_OPTIONS)                             \
  }
#define FA_BACKWARD_BASE_OPTIONS(Base, FORWARD)                            \
  Base base() const {                                                      \
    Base options;                                                          \
    options.set_forward(forward().base());                                 \
    std::copy_n(grad_mask.begin(), kGradients, options.grad_mask.begin()); \
    return options;                                                        \
  }                                                                        \
  FunctionOptions functions() const { return forward().functions(); }
#define FA_FLEX_TANGENT_ACCESS() FA_TANGENT_ACCESS_OF(FlexInputTangents, FA_FLEX_DIFFERENTIABLE_ROWS)

// Dense tensors.

struct FlexTensors {
  FA_TENSOR_FIELDS(FA_FLEX_TENSORS, same_rule)
  FA_BASE_TENSORS(AttentionTensors, FA_ATTENTION_TENSORS)
};
struct FlexOptions {
  FA_OPTION_FIELDS(FA_FLEX_OPTIONS)
  FA_BASE_OPTIONS(AttentionOptions, FA_ATTENTION_OPTIONS)
};
struct AttentionFlex : OperatorTypes<FlexTensors, FlexOptions, AttentionResult, AttentionParams> {
  static constexpr const char* kName = "attention_flex";
  using Base = Attention;
  FA_OPERATOR_STEPS(AttentionFlex)
};

struct FlexBackwardTensors {
  FA_TENSOR_FIELDS(FA_FLEX_BACKWARD_TENSORS, same_rule)
  FA_FORWARD_ACCESS(FlexTensors, FA_FLEX_TENSORS)
  FA_BASE_TENSORS(AttentionBackwardTensors, FA_ATTENTION_BACKWARD_TENSORS)
};
struct FlexBackwardOptions {
  FA_OPTION_FIELDS(FA_FLEX_BACKWARD_OPTIONS)
  FA_FORWARD_ACCESS(FlexOptions, FA_FLEX_OPTIONS)
  FA_BACKWARD_BASE_OPTIONS(AttentionBackwardOptions, FlexOptions)
};
struct AttentionFlexBackward
    : OperatorTypes<FlexBackwardTensors, FlexBackwardOptions, FlexGradients, BackwardParams> {
  static constexpr const char* kName = "attention_flex_backward";
  using Base = AttentionBackward;
  FA_OPERATOR_STEPS(AttentionFlexBackward)
};

struct FlexJvpTensors {
  FA_TENSOR_FIELDS(FA_FLEX_JVP_TENSORS, same_rule)
  FA_FLEX_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(FlexTensors, FA_FLEX_TENSORS)
  FA_BASE_TENSORS(AttentionJvpTensors, FA_ATTENTION_JVP_TENSORS)
};
struct AttentionFlexJvp : OperatorTypes<FlexJvpTensors, FlexOptions, AttentionJvpResult, JvpParams> {
  static constexpr const char* kName = "attention_flex_jvp";
  using Base = AttentionJvp;
  FA_OPERATOR_STEPS(AttentionFlexJvp)
};

struct FlexDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_FLEX_DOUBLE_BACKWARD_TENSORS, same_rule)
  FA_FLEX_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(FlexTensors, FA_FLEX_TENSORS)
  FA_BASE_TENSORS(AttentionDoubleBackwardTensors, FA_ATTENTION_DOUBLE_BACKWARD_TENSORS)
};
struct AttentionFlexDoubleBackward
    : OperatorTypes<FlexDoubleBackwardTensors, FlexBackwardOptions, FlexGradients, DoubleBackwardParams> {
  static constexpr const char* kName = "attention_flex_double_backward";
  using Base = AttentionDoubleBackward;
  FA_OPERATOR_STEPS(AttentionFlexDoubleBackward)
};

// Packed sequences.

struct VarlenFlexTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_FLEX_TENSORS, packed_rule)
  FA_BASE_TENSORS(VarlenTensors, FA_VARLEN_TENSORS)
};
struct VarlenFlexOptions {
  FA_OPTION_FIELDS(FA_VARLEN_FLEX_OPTIONS)
  FA_BASE_OPTIONS(VarlenOptions, FA_VARLEN_OPTIONS)
};
struct AttentionVarlenFlex
    : OperatorTypes<VarlenFlexTensors, VarlenFlexOptions, AttentionResult, AttentionParams> {
  static constexpr const char* kName = "attention_varlen_flex";
  using Base = AttentionVarlen;
  FA_OPERATOR_STEPS(AttentionVarlenFlex)
};

struct VarlenFlexBackwardTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_FLEX_BACKWARD_TENSORS, packed_rule)
  FA_FORWARD_ACCESS(VarlenFlexTensors, FA_VARLEN_FLEX_TENSORS)
  FA_BASE_TENSORS(VarlenBackwardTensors, FA_VARLEN_BACKWARD_TENSORS)
};
struct VarlenFlexBackwardOptions {
  FA_OPTION_FIELDS(FA_VARLEN_FLEX_BACKWARD_OPTIONS)
  FA_FORWARD_ACCESS(VarlenFlexOptions, FA_VARLEN_FLEX_OPTIONS)
  FA_BACKWARD_BASE_OPTIONS(VarlenBackwardOptions, VarlenFlexOptions)
};
struct AttentionVarlenFlexBackward
    : OperatorTypes<VarlenFlexBackwardTensors, VarlenFlexBackwardOptions, FlexGradients, BackwardParams> {
  static constexpr const char* kName = "attention_varlen_flex_backward";
  using Base = AttentionVarlenBackward;
  FA_OPERATOR_STEPS(AttentionVarlenFlexBackward)
};

struct VarlenFlexJvpTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_FLEX_JVP_TENSORS, packed_rule)
  FA_FLEX_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(VarlenFlexTensors, FA_VARLEN_FLEX_TENSORS)
  FA_BASE_TENSORS(VarlenJvpTensors, FA_VARLEN_JVP_TENSORS)
};
struct AttentionVarlenFlexJvp
    : OperatorTypes<VarlenFlexJvpTensors, VarlenFlexOptions, AttentionJvpResult, JvpParams> {
  static constexpr const char* kName = "attention_varlen_flex_jvp";
  using Base = AttentionVarlenJvp;
  FA_OPERATOR_STEPS(AttentionVarlenFlexJvp)
};

struct VarlenFlexDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_VARLEN_FLEX_DOUBLE_BACKWARD_TENSORS, packed_rule)
  FA_FLEX_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(VarlenFlexTensors, FA_VARLEN_FLEX_TENSORS)
  FA_BASE_TENSORS(VarlenDoubleBackwardTensors, FA_VARLEN_DOUBLE_BACKWARD_TENSORS)
};
struct AttentionVarlenFlexDoubleBackward
    : OperatorTypes<VarlenFlexDoubleBackwardTensors, VarlenFlexBackwardOptions, FlexGradients,
                    DoubleBackwardParams> {
  static constexpr const char* kName = "attention_varlen_flex_double_backward";
  using Base = AttentionVarlenDoubleBackward;
  FA_OPERATOR_STEPS(AttentionVarlenFlexDoubleBackward)
};

// Caches.

struct CacheFlexTensors {
  FA_TENSOR_FIELDS(FA_CACHE_FLEX_TENSORS, cache_rule)
  FA_BASE_TENSORS(CacheTensors, FA_CACHE_TENSORS)
};
struct CacheFlexOptions {
  FA_OPTION_FIELDS(FA_CACHE_FLEX_OPTIONS)
  FA_BASE_OPTIONS(CacheOptions, FA_CACHE_OPTIONS)
};
struct AttentionCacheFlex
    : OperatorTypes<CacheFlexTensors, CacheFlexOptions, AttentionResult, AttentionParams> {
  static constexpr const char* kName = "attention_cache_flex";
  using Base = AttentionCache;
  FA_OPERATOR_STEPS(AttentionCacheFlex)
};

// The base's params also point to the functions.
template <class Op>
struct PackedFlex : Packed<typename Op::Base> {
  FunctionTensors function_tensors;
  std::unique_ptr<UserFunctions> functions;
};
template <>
struct Packed<AttentionFlex> : PackedFlex<AttentionFlex> {};
template <>
struct Packed<AttentionFlexBackward> : PackedFlex<AttentionFlexBackward> {};
template <>
struct Packed<AttentionVarlenFlex> : PackedFlex<AttentionVarlenFlex> {};
template <>
struct Packed<AttentionVarlenFlexBackward> : PackedFlex<AttentionVarlenFlexBackward> {};
template <>
struct Packed<AttentionCacheFlex> : PackedFlex<AttentionCacheFlex> {};

}  // namespace flash_attn_ext
