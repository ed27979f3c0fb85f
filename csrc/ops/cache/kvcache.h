// Declares attention to caches of keys and values, with the rows of dense/attention.h.
//
//   attention_cache   forward only: each packed sequence of queries attends to the rows of its cache
//
// key and value are caches, one for each sequence, or pages that block_table assigns to sequences. Letters as in
// packed/varlen.h.
#pragma once

#include "../packed/varlen.h"

namespace flash_attn_ext {

constexpr Shape kCacheScaleShape{Shape::kExact, 3, {Dim::kCaches, Dim::kCacheRows, Dim::kHeadsKv}};
constexpr Shape kCacheGroupShape{Shape::kCheckedByOperator};
constexpr Shape kTableShape{Shape::kTable};
// A mask of the new tokens has one of two shapes. Column c is the key of the sequence's query c.
//   (B, H, max_seqlen_q, max_seqlen_q). Each size may be 1.
//   (H, T_q, max_seqlen_q), with the rows of query. The first and the last size may be 1.
constexpr Shape kTreeMaskShape{Shape::kTreeMask};

// key and value are caches: (caches, rows, H_kv, D). Query is packed.
constexpr TensorRule cache_rule(TensorRule rule) {
  const auto dims = rule.shape.dims;
  if (rule.shape.kind == Shape::kExact && dims[2] == Dim::kSeqlenK) {
    rule.shape.dims = {Dim::kCaches, Dim::kCacheRows, dims[1], dims[3]};
    rule.dtype = DtypeRule::kCache;
  }
  rule.shape = packed_shape(rule.shape);
  rule.autocast = AutocastRule::kKeep;
  rule.vmap = VmapRule::kLoop;
  return rule;
}

// clang-format off
//   name          type            shape              dtype      autocast        vmap
#define FA_CACHE_FORMAT_ROWS(X)                                                                     \
  /* (B, pages of a sequence): the page numbers of each sequence. */                                \
  X(block_table,   OptionalTensor, kTableShape,       kIndex,    kKeep,          kLoop)             \
  /* Factors of 8-bit keys and values. */                                                           \
  X(key_scale,     OptionalTensor, kCacheScaleShape,  kFloat32,  kKeep,          kLoop)             \
  X(value_scale,   OptionalTensor, kCacheScaleShape,  kFloat32,  kKeep,          kLoop)

#define FA_INT4_ROWS(X)                                                                             \
  /* (caches, rows, H_kv, groups): scales and zero points of int4 keys and values, CacheGroups. */  \
  X(key_group_scale,   OptionalTensor, kCacheGroupShape, kCheckedByOperator, kKeep, kLoop)          \
  X(value_group_scale, OptionalTensor, kCacheGroupShape, kCheckedByOperator, kKeep, kLoop)          \
  X(key_group_zero,    OptionalTensor, kCacheGroupShape, kCheckedByOperator, kKeep, kLoop)          \
  X(value_group_zero,  OptionalTensor, kCacheGroupShape, kCheckedByOperator, kKeep, kLoop)

#define FA_CACHE_TENSORS(X)                                                                         \
  FA_QUERY_AND_KEY_ROWS(FA_SAME, X)                                                                 \
  FA_VALUE_ROW(FA_SAME, X)                                                                          \
  FA_PER_HEAD(X)                                                                                    \
  X(cu_seqlens_q,  at::Tensor,     kOffsetsShape,     kIndex,    kKeep,          kLoop)             \
  /* Number of rows in each sequence's cache, left padding included. */                             \
  X(seqused_k,     at::Tensor,     kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  /* The cache of each sequence; none: sequence b has cache b. */                                   \
  X(batch_idx,     OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  /* Number of rows at the start of each cache that are hidden. */                                  \
  X(leftpad,       OptionalTensor, kLengthsShape,     kIndex,    kKeep,          kLoop)             \
  FA_CACHE_FORMAT_ROWS(X)                                                                           \
  /* Mask of the last S_q keys, the new tokens. Keys before them are visible. */                    \
  X(tree_mask,     OptionalTensor, kTreeMaskShape,    kMask,     kKeep,          kLoop)             \
  FA_INT4_ROWS(X)

#define FA_CACHE_OPTIONS(X)                                                                         \
  FA_ATTENTION_OPTIONS(X)                                                                           \
  FA_MAX_SEQLEN_Q_OPTION(X)                                                                         \
  /* Keys are [key, value], and query has the columns of both. */                                   \
  X(key_has_value, bool,           false,             true,      "")                                \
  /* CacheParams::float8_products. */                                                               \
  X(float8_products, bool,         false,             true,      "")                                \
  /* Rows of key are CacheDType::kLatent. key and value are views of the first 576 and 512 bytes. */ \
  X(latent_rows,   bool,           false,             true,      "")
// clang-format on

struct CacheTensors {
  FA_TENSOR_FIELDS(FA_CACHE_TENSORS, cache_rule)
};
struct CacheOptions {
  FA_OPTION_FIELDS(FA_CACHE_OPTIONS)
  FA_ATTENTION_OPTIONS_ACCESS()
};
// out (T_q, H, D_v), lse (H, T_q)
struct AttentionCache : OperatorTypes<CacheTensors, CacheOptions, AttentionResult, AttentionParams> {
  static constexpr const char* kName = "attention_cache";
  static constexpr bool kIsUnboxed = true;
  FA_OPERATOR_STEPS(AttentionCache)
};

// The format of a cache, for the operators that read and write caches.
CacheDType pack_cache_dtype(at::ScalarType dtype);
CacheScale pack_scale(const OptionalTensor& t);
// `cache`: the tensor that the groups belong to.
CacheGroups pack_groups(const at::Tensor& cache, const OptionalTensor& scales, const OptionalTensor& zeros);

// The columns that a row of the cache holds: two in each byte of int4.
c10::SymInt columns_of(const at::Tensor& cache);

}  // namespace flash_attn_ext
