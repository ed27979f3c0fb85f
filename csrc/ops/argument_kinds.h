// What a row of an operator's declaration (ops.h) says of a tensor: its shape, its dtype, and what autocast,
// torch.vmap and autograd do with it.
#pragma once

#include <cstdint>

namespace flash_attn_ext {

// A size that several tensors share. kDimNames has each one's name and the tensor that decides about it.
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
  kOffsets,  // one more than there are packed sequences
  kCaches,   // caches, or pages
  kCacheRows,
  kTotalNew,  // rows to be appended to caches
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
    kExact,              // these dimensions
    kBroadcast,          // each may be 1 instead
    kMaybeBatched,       // the first, the batch, may be missing
    kSeedOffset,         // two elements, contiguous
    kPerSequence,        // one element for each packed sequence
    kPackedMask,         // of packed sequences: see varlen.h
    kTreeMask,           // beside a cache: see kvcache.h
    kTable,              // a row for each packed sequence
    kRotary,             // a row for each position
    kCheckedByOperator,  // of an operator's own checks
  };
  Kind kind;
  int8_t count = 0;
  Dim dims[4] = {};
};

enum class DtypeRule : int8_t {
  kFloating,     // float32, float64, bfloat16 or float16
  kOfQuery,      // the same as query's
  kMask,         // bool, query's or float32
  kAdded,        // query's or float32
  kAccumulator,  // float32; float64 where query is float64
  kInt64,
  kIndex,  // int32 or int64
  kCache,  // query's or 8 bits: int8, float8_e4m3fn, float8_e5m2
  kFloat32,
  kCheckedByOperator,
};

enum class AutocastRule : int8_t {
  kCast,           // to the autocast dtype, as torch does for scaled_dot_product_attention
  kUnlessFloat32,  // the same, but float32 stays: kernels add it in float32 anyway
  kKeep,
};

enum class VmapRule : int8_t {
  kBatch,       // dimension 0 is the batch: the mapped dimension joins it
  kBatchOrOne,  // the same, but dimension 0 may be 1 and then stays, if it is not mapped
  kPerHead,     // (heads) or (batch, heads)
  kLoop,        // the batch index matters: where this tensor is used, the operator is called once per element
};

struct TensorRule {
  const char* name;
  Shape shape;
  DtypeRule dtype;
  AutocastRule autocast;
  VmapRule vmap;
};

}  // namespace flash_attn_ext
