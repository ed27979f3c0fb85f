// Declares the operator that appends rows to caches.
//
//   append_to_cache   writes new keys and values after each sequence's rows, in place; rotates queries and new keys
//
// Its schema says that it writes to key_cache and value_cache, and to the scales and zero points of int4. Letters as in packed/varlen.h; T_new counts new rows.
#pragma once

#include "../../core/append.h"
#include "kvcache.h"

namespace flash_attn_ext {

constexpr Shape kCacheKeyShape{
    Shape::kExact, 4, {Dim::kCaches, Dim::kCacheRows, Dim::kHeadsKv, Dim::kHeadDim}};
constexpr Shape kCacheValueShape{
    Shape::kExact, 4, {Dim::kCaches, Dim::kCacheRows, Dim::kHeadsKv, Dim::kHeadDimV}};
constexpr Shape kRotaryShape{Shape::kRotary};

// query is packed, and so are key and value, which hold the new rows.
constexpr TensorRule append_rule(TensorRule rule) {
  rule = packed_rule(rule);
  if (rule.shape.dims[0] == Dim::kTotalK) rule.shape.dims[0] = Dim::kTotalNew;
  rule.autocast = AutocastRule::kKeep;
  return rule;
}

// clang-format off
//   name               type            shape              dtype      autocast        vmap
#define FA_APPEND_TENSORS(X)                                                                            \
  FA_QUERY_AND_KEY_ROWS(FA_SAME, X)                                                                     \
  FA_VALUE_ROW(FA_SAME, X)                                                                              \
  X(key_cache,          at::Tensor,     kCacheKeyShape,    kCache,    kKeep,          kLoop)            \
  X(value_cache,        at::Tensor,     kCacheValueShape,  kCache,    kKeep,          kLoop)            \
  X(cu_seqlens_q,       at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)            \
  X(cu_seqlens_k_new,   at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)            \
  /* Number of rows in each sequence's cache before the call. */                                        \
  X(cache_seqlens,      at::Tensor,     kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  /* Cosines and sines, one row for each position; none: no rotation. */                                \
  X(rotary_cos,         OptionalTensor, kRotaryShape,      kAdded,    kKeep,          kLoop)            \
  X(rotary_sin,         OptionalTensor, kRotaryShape,      kAdded,    kKeep,          kLoop)            \
  /* Position of each sequence's first new key; none: cache_seqlens. */                                 \
  X(rotary_seqlens,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  X(cache_batch_idx,    OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  X(cache_leftpad,      OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  FA_CACHE_FORMAT_ROWS(X)                                                                               \
  FA_INT4_ROWS(X)

#define FA_APPEND_OPTIONS(X)                                                                                        \
  /* true: the pairs of columns are (0, 1), (2, 3), ...; false: column c and column c + rotary_dim / 2. */          \
  X(interleaved,             bool,              true,         true,                             "")                 \
  /* true: query i has the position of new key i; false: all queries have the position of the first new key. */     \
  X(advance_query_positions, bool,              true,         true,                             "")

#define FA_APPEND_RESULT(X)                                                                     \
  X(query,         at::Tensor)  /* rotated; empty if there are no rotary tables */              \
  X(lengths,       at::Tensor)  /* cache_seqlens after the call */
// clang-format on

struct AppendTensors {
  FA_TENSOR_FIELDS(FA_APPEND_TENSORS, append_rule)
};
struct AppendOptions {
  FA_OPTION_FIELDS(FA_APPEND_OPTIONS)
};
struct AppendResult {
  FA_RESULT_FIELDS(FA_APPEND_RESULT)
};
struct AppendToCache : OperatorTypes<AppendTensors, AppendOptions, AppendResult, AppendParams> {
  static constexpr const char* kName = "append_to_cache";
  static constexpr const char* kWritten[] = {"key_cache",         "value_cache",    "key_group_scale",
                                             "value_group_scale", "key_group_zero", "value_group_zero"};
  FA_OPERATOR_STEPS(AppendToCache)
};

}  // namespace flash_attn_ext
