// The operator on caches of keys and values, declared as in ops.h.
//
//   attention_cache   forward only: packed queries attend to what their sequence has in a cache
//
// key and value are caches, one for each sequence, or the pages that a block_table shares out. Letters as in varlen.h.
#pragma once

#include "varlen.h"

namespace flash_attn_ext {

constexpr Shape kCacheKeyShape{
    Shape::kExact, 4, {Dim::kCaches, Dim::kCacheRows, Dim::kHeadsKv, Dim::kHeadDim}};
constexpr Shape kCacheValueShape{
    Shape::kExact, 4, {Dim::kCaches, Dim::kCacheRows, Dim::kHeadsKv, Dim::kHeadDimV}};
constexpr Shape kCacheScaleShape{Shape::kExact, 3, {Dim::kCaches, Dim::kCacheRows, Dim::kHeadsKv}};
constexpr Shape kTableShape{Shape::kTable};
// Either (B, H, max_seqlen_q, max_seqlen_q), each size 1 or the full one; or (H, T_q, max_seqlen_q), whose rows are those
// of query and which may be 1 in the first and last dimension. Column c is the key of the sequence's query c.
constexpr Shape kTreeMaskShape{Shape::kTreeMask};

// clang-format off
//   name          type            shape              dtype      autocast        vmap
#define FA_CACHE_TENSORS(X)                                                                         \
  X(query,         at::Tensor,     kPackedQueryShape, kFloating, kKeep,          kLoop)             \
  X(key,           at::Tensor,     kCacheKeyShape,    kCache,    kKeep,          kLoop)             \
  X(value,         at::Tensor,     kCacheValueShape,  kCache,    kKeep,          kLoop)             \
  X(alibi_slopes,  OptionalTensor, kPerHeadShape,     kAdded,    kKeep,          kLoop)             \
  X(cu_seqlens_q,  at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)             \
  /* How many rows of each sequence are in its cache, left padding included. */                     \
  X(seqused_k,     at::Tensor,     kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  /* Which cache is whose; none: its own number. */                                                 \
  X(batch_idx,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  /* How many rows at the start of each cache are left out. */                                      \
  X(leftpad,       OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  /* (B, pages of a sequence): the numbers of its pages. */                                         \
  X(block_table,   OptionalTensor, kTableShape,       kIndex,    kKeep,          kLoop)             \
  /* What 8-bit keys and values are multiplied with. */                                             \
  X(key_scale,     OptionalTensor, kCacheScaleShape,  kFloat32,  kKeep,          kLoop)             \
  X(value_scale,   OptionalTensor, kCacheScaleShape,  kFloat32,  kKeep,          kLoop)             \
  /* Of the new tokens among themselves: the last S_q keys. All keys before are visible. */         \
  X(tree_mask,     OptionalTensor, kTreeMaskShape,    kMask,     kKeep,          kLoop)             \
  X(sink,          OptionalTensor, kPerHeadShape,     kAdded,    kKeep,          kLoop)

#define FA_CACHE_OPTIONS(X)                                                                                      \
  FA_ATTENTION_OPTIONS(X)                                                                                        \
  X(max_seqlen_q,   std::optional<c10::SymInt>, std::nullopt, !v || *v >= 0,                "0 or more")
// clang-format on

struct CacheTensors {
  FA_TENSOR_FIELDS(FA_CACHE_TENSORS)
};
struct CacheOptions {
  FA_OPTION_FIELDS(FA_CACHE_OPTIONS)
  AttentionOptions attention() const { FA_PICK(AttentionOptions, FA_ATTENTION_OPTIONS) }
  void set_attention(const AttentionOptions& attention) { FA_SET(attention, FA_ATTENTION_OPTIONS) }
};
struct AttentionCache {
  static constexpr const char* kName = "attention_cache";
  static std::string results() { return "(Tensor out, Tensor lse)"; }
  using Tensors = CacheTensors;
  using Options = CacheOptions;
  using Result = AttentionResult;  // out (T_q, H, D_v), lse (H, T_q)
};

// As for packed sequences: varlen.h.
void check_cache(const CacheTensors& tensors, const CacheOptions& options);
AttentionResult empty_cache_result(const CacheTensors& in);
CacheTensors to_kernel_layout(const CacheTensors& given);
struct PackedCache {
  CacheTensors tensors;
  AttentionParams params;
};
PackedCache pack_cache(const CacheTensors& given, const CacheOptions& options, const AttentionResult& result);
CacheDType pack_cache_dtype(at::ScalarType dtype);
CacheScale pack_scale(const OptionalTensor& t);

}  // namespace flash_attn_ext
