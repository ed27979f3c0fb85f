// Attention by index, with the rows of dense/attention.h: each query names the keys, or the blocks of keys, that it may
// attend to.
//
//   attention_indexed                   forward
//   attention_indexed_backward          its gradients
//   attention_indexed_jvp, attention_indexed_double_backward
//                                       other derivatives; kernels in Python: flash_attn_ext/flex/derivatives.py
#pragma once

#include "../../core/indexed.h"
#include "../dense/attention.h"

namespace flash_attn_ext {

constexpr Shape kKeyIndicesShape{Shape::kCheckedByOperator};

// The forward also takes key and value of 8 bits: rows of FlashMLA's caches.
constexpr TensorRule indexed_rule(TensorRule rule) {
  if (rule.shape.kind == Shape::kExact && rule.shape.dims[2] == Dim::kSeqlenK) rule.dtype = DtypeRule::kCache;
  return rule;
}

// clang-format off
#define FA_INDEXED_TENSORS(X)                                                                                    \
  FA_ATTENTION_TENSORS(X)                                                                                        \
  /* (B or 1, 1 or H_kv, S_q, count): KeyIndices. */                                                             \
  X(key_indices,    OptionalTensor, kKeyIndicesShape, kIndex,   kKeep,          kLoop)                           \
  /* (S_q, 4), with dropout: the place of each row of query in a larger call, DropoutParams. */                  \
  X(dropout_places, OptionalTensor, kKeyIndicesShape, kInt64,   kKeep,          kLoop)

#define FA_INDEXED_OPTIONS(X)                                                                                    \
  FA_ATTENTION_OPTIONS(X)                                                                                        \
  /* Keys of a block; 0: key_indices names single keys. */                                                       \
  X(key_block_size, int64_t,                    0,            v >= 0,           "1 or more")                      \
  /* As in cache/kvcache.h. Forward only. */                                                                     \
  X(latent_rows,    bool,                       false,        true,             "")

#define FA_INDEXED_BACKWARD_TENSORS(X)                                                                           \
  FA_COTANGENTS(X)                                                                                               \
  FA_INDEXED_TENSORS(X)                                                                                          \
  FA_RESULTS(X)

#define FA_INDEXED_JVP_TENSORS(X)                                                                                \
  FA_TANGENTS(X)                                                                                                 \
  FA_INDEXED_TENSORS(X)

#define FA_INDEXED_DOUBLE_BACKWARD_TENSORS(X)                                                                    \
  FA_COTANGENTS(X)                                                                                               \
  FA_INDEXED_JVP_TENSORS(X)                                                                                      \
  FA_RESULTS(X)                                                                                                  \
  FA_RESULT_TANGENTS(X)

#define FA_INDEXED_BACKWARD_OPTIONS(X)                                                                           \
  FA_INDEXED_OPTIONS(X)                                                                                          \
  FA_GRAD_MASK_OPTION(X)
// clang-format on

struct IndexedTensors {
  FA_TENSOR_FIELDS(FA_INDEXED_TENSORS, indexed_rule)
  AttentionTensors attention() const { FA_PICK(AttentionTensors, FA_ATTENTION_TENSORS) }
};
struct IndexedOptions {
  FA_OPTION_FIELDS(FA_INDEXED_OPTIONS)
  AttentionOptions attention() const { FA_PICK(AttentionOptions, FA_ATTENTION_OPTIONS) }
};
struct AttentionIndexed : OperatorTypes<IndexedTensors, IndexedOptions, AttentionResult, IndexedParams> {
  static constexpr const char* kName = "attention_indexed";
  FA_OPERATOR_STEPS(AttentionIndexed)
};

struct IndexedBackwardTensors {
  FA_TENSOR_FIELDS(FA_INDEXED_BACKWARD_TENSORS, same_rule)
  FA_FORWARD_ACCESS(IndexedTensors, FA_INDEXED_TENSORS)
  AttentionBackwardTensors attention() const {
    FA_PICK(AttentionBackwardTensors, FA_ATTENTION_BACKWARD_TENSORS)
  }
};
struct IndexedBackwardOptions {
  FA_OPTION_FIELDS(FA_INDEXED_BACKWARD_OPTIONS)
  FA_FORWARD_ACCESS(IndexedOptions, FA_INDEXED_OPTIONS)
  AttentionBackwardOptions attention() const {
    FA_PICK(AttentionBackwardOptions, FA_ATTENTION_BACKWARD_OPTIONS)
  }
};
struct AttentionIndexedBackward
    : OperatorTypes<IndexedBackwardTensors, IndexedBackwardOptions, Gradients, IndexedBackwardParams> {
  static constexpr const char* kName = "attention_indexed_backward";
  FA_OPERATOR_STEPS(AttentionIndexedBackward)
};

struct IndexedJvpTensors {
  FA_TENSOR_FIELDS(FA_INDEXED_JVP_TENSORS, same_rule)
  FA_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(IndexedTensors, FA_INDEXED_TENSORS)
  AttentionJvpTensors attention() const { FA_PICK(AttentionJvpTensors, FA_ATTENTION_JVP_TENSORS) }
};
struct AttentionIndexedJvp : OperatorTypes<IndexedJvpTensors, IndexedOptions, AttentionJvpResult, JvpParams> {
  static constexpr const char* kName = "attention_indexed_jvp";
  FA_OPERATOR_STEPS(AttentionIndexedJvp)
};

struct IndexedDoubleBackwardTensors {
  FA_TENSOR_FIELDS(FA_INDEXED_DOUBLE_BACKWARD_TENSORS, same_rule)
  FA_TANGENT_ACCESS()
  FA_FORWARD_ACCESS(IndexedTensors, FA_INDEXED_TENSORS)
  AttentionDoubleBackwardTensors attention() const {
    FA_PICK(AttentionDoubleBackwardTensors, FA_ATTENTION_DOUBLE_BACKWARD_TENSORS)
  }
};
struct AttentionIndexedDoubleBackward
    : OperatorTypes<IndexedDoubleBackwardTensors, IndexedBackwardOptions, Gradients, DoubleBackwardParams> {
  static constexpr const char* kName = "attention_indexed_double_backward";
  FA_OPERATOR_STEPS(AttentionIndexedDoubleBackward)
};

// Throws ValueError for a number beyond the keys. Called by the CPU key before anything runs.
void check_numbers(const IndexedTensors& in, const IndexedOptions& options);
inline void check_numbers(const IndexedBackwardTensors& in, const IndexedBackwardOptions& options) {
  check_numbers(in.forward(), options.forward());
}

}  // namespace flash_attn_ext
