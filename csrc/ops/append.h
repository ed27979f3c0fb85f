// The operator that appends rows to caches, declared as in ops.h.
//
//   append_to_cache   writes new keys and values behind each sequence's rows, in place; rotates queries and new keys
//
// Its schema says that it writes to key_cache and value_cache. Letters as in varlen.h; T_new counts new rows.
#pragma once

#include "../core/append.h"
#include "kvcache.h"

namespace flash_attn_ext {

constexpr Shape kNewKeyShape{Shape::kExact, 3, {Dim::kTotalNew, Dim::kHeadsKv, Dim::kHeadDim}};
constexpr Shape kNewValueShape{Shape::kExact, 3, {Dim::kTotalNew, Dim::kHeadsKv, Dim::kHeadDimV}};
constexpr Shape kRotaryShape{Shape::kRotary};

// clang-format off
//   name               type            shape              dtype      autocast        vmap
#define FA_APPEND_TENSORS(X)                                                                            \
  X(query,              at::Tensor,     kPackedQueryShape, kFloating, kKeep,          kLoop)            \
  X(key,                at::Tensor,     kNewKeyShape,      kOfQuery,  kKeep,          kLoop)            \
  X(value,              at::Tensor,     kNewValueShape,    kOfQuery,  kKeep,          kLoop)            \
  X(key_cache,          at::Tensor,     kCacheKeyShape,    kCache,    kKeep,          kLoop)            \
  X(value_cache,        at::Tensor,     kCacheValueShape,  kCache,    kKeep,          kLoop)            \
  X(cu_seqlens_q,       at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)            \
  X(cu_seqlens_k_new,   at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)            \
  /* How many rows of each sequence are in its cache before. */                                         \
  X(cache_seqlens,      at::Tensor,     kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  /* Cosines and sines, a row for each position; none: nothing turns. */                                \
  X(rotary_cos,         OptionalTensor, kRotaryShape,      kAdded,    kKeep,          kLoop)            \
  X(rotary_sin,         OptionalTensor, kRotaryShape,      kAdded,    kKeep,          kLoop)            \
  /* Positions of the first new keys; none: cache_seqlens. */                                           \
  X(rotary_seqlens,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  X(cache_batch_idx,    OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  X(cache_leftpad,      OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)            \
  X(block_table,        OptionalTensor, kTableShape,       kIndex,    kKeep,          kLoop)            \
  /* What 8-bit rows will be multiplied with: new ones are divided by it. */                            \
  X(key_scale,          OptionalTensor, kCacheScaleShape,  kFloat32,  kKeep,          kLoop)            \
  X(value_scale,        OptionalTensor, kCacheScaleShape,  kFloat32,  kKeep,          kLoop)

#define FA_APPEND_OPTIONS(X)                                                                                     \
  /* Pairs of columns are (0, 1), (2, 3), ...; false: c and c + rotary_dim / 2. */                               \
  X(interleaved,    bool,                   true,         true,                             "")                  \
  /* Query i turns by the position of new key i; false: all by that of the first. */                             \
  X(advance_query_positions,   bool,                   true,         true,                             "")

#define FA_APPEND_RESULT(X)                                                                     \
  X(query,         at::Tensor)  /* rotated; without rotary tables empty */                        \
  X(lengths,       at::Tensor)  /* cache_seqlens afterwards */
// clang-format on

struct AppendTensors {
  FA_TENSOR_FIELDS(FA_APPEND_TENSORS)
};
struct AppendOptions {
  FA_OPTION_FIELDS(FA_APPEND_OPTIONS)
};
struct AppendResult {
  FA_APPEND_RESULT(FA_TENSOR_FIELD)
  FA_MEMBERS(FA_APPEND_RESULT)
};
struct AppendToCache {
  static constexpr const char* kName = "append_to_cache";
  static std::string results() { return "(Tensor query, Tensor lengths)"; }
  static constexpr const char* kWritten[] = {"key_cache", "value_cache"};
  using Tensors = AppendTensors;
  using Options = AppendOptions;
  using Result = AppendResult;
};

// As for attention: checks.h. On CPU positions, offsets and page numbers are read before anything is written.
void check_append(const AppendTensors& tensors, const AppendOptions& options);
AppendResult empty_append_result(const AppendTensors& in);

// As for attention: pack_params.h.
struct PackedAppend {
  AppendTensors tensors;
  AppendParams params;
};
PackedAppend pack_append(const AppendTensors& given, const AppendOptions& options,
                         const AppendResult& result);

}  // namespace flash_attn_ext
