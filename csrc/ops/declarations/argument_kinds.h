// The words of a tensor's row in an operator's declaration (dense/attention.h): its shape, its dtype, and how
// autocast and torch.vmap treat it.
#pragma once

#include <array>
#include <cstdint>

namespace flash_attn_ext {

// A size that several tensors share. kDimNames has its name and the tensor that defines it.
enum class Dim : int8_t {
  kBatch,
  kHeads,
  kHeadsKv,
  kSeqlenQ,
  kSeqlenK,
  kHeadDim,
  kHeadDimV,
  kTotalQ,  // rows of packed sequences
  kTotalK,
  kOffsets,  // number of packed sequences + 1
  kCaches,   // caches, or pages
  kCacheRows,
  kTotalNew,  // rows to append to caches
  kCount,
};

struct DimName {
  const char* name;
  const char* owner;
};
constexpr DimName kDimNames[] = {{"batch", "query"},          {"heads", "query"},
                                 {"heads_kv", "key"},         {"seqlen_q", "query"},
                                 {"seqlen_k", "key"},         {"head_dim", "query"},
                                 {"head_dim_v", "value"},     {"total_q", "query"},
                                 {"total_k", "key"},          {"sequences + 1", "cu_seqlens_q"},
                                 {"caches", "the key cache"}, {"rows", "the key cache"},
                                 {"total_new", "key"}};

struct Shape {
  enum Kind : int8_t {
    kExact,         // exactly these dimensions
    kBroadcast,     // each dimension may be 1 instead
    kMaybeBatched,  // the first dimension, the batch, may be missing
    kSeedOffset,    // two elements, contiguous
    kPerSequence,   // one element for each packed sequence
    kPackedMask,    // a mask of packed sequences: packed/varlen.h
    kTreeMask,      // a mask of the new tokens of a cache: cache/kvcache.h
    kTable,         // one row for each packed sequence
    kRotary,        // one row for each position
    kCheckedByOperator,
  };
  Kind kind;
  int8_t count = 0;
  std::array<Dim, 4> dims = {};
};

enum class DtypeRule : int8_t {
  kFloating,     // float32, float64, bfloat16 or float16
  kOfQuery,      // query's dtype
  kMask,         // bool, query's dtype or float32
  kAdded,        // query's dtype or float32
  kAccumulator,  // float32; float64 if query is float64
  kInt64,
  kIndex,  // int32 or int64
  kCache,  // query's dtype or 8 bits: int8, float8_e4m3fn, float8_e5m2
  kFloat32,
  kCheckedByOperator,
};

enum class AutocastRule : int8_t {
  kCast,           // to the autocast dtype, as torch does for scaled_dot_product_attention
  kUnlessFloat32,  // the same, but float32 is not cast: kernels add in float32 anyway
  kKeep,           // not cast
};

enum class VmapRule : int8_t {
  kBatch,       // dimension 0 is the batch: vmap merges the mapped dimension into it
  kBatchOrOne,  // the same, but dimension 0 may be 1 and then stays 1, if it is not mapped
  kPerHead,     // (heads) or (batch, heads)
  kLoop,        // the batch index matters: with this tensor, vmap calls the operator once per element
};

struct TensorRule {
  const char* name;
  Shape shape;
  DtypeRule dtype;
  AutocastRule autocast;
  VmapRule vmap;
};

}  // namespace flash_attn_ext
