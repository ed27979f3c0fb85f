// The workspace of the indexer's backward. No array has S_q x S_k elements.
#pragma once

#include <type_traits>

#include "../../core/indexer.h"
#include "key_lists.h"

namespace flash_attn_ext::cuda::simt {

// Without chosen keys, the number of queries of a batch element with stored gradients of the scores at a time.
constexpr int64_t kDenseQueries = 128;

// Gradients of the scores of queries [first, first + queries) of each batch element, row by row.
template <class T>
struct ScoreGradients {
  const T* rows;
  int64_t stride;  // elements of a row: the slots of chosen keys, or all keys
  int64_t first, queries;
  bool has_masked;  // -0 means no gradient: a hidden key, or a query without a target

  FA_HOST_DEVICE int64_t row(int64_t b, int64_t i) const { return (b * queries + i - first) * stride; }
  // Without has_masked, -0 is a gradient like 0.
  FA_HOST_DEVICE T of(T dscore) const { return has_masked ? dscore : dscore + T(0); }
};

template <class T>
struct IndexerBackwardWorkspace {
  KeyLists lists;     // of the chosen keys
  int64_t queries;    // of a batch element at a time
  T* dscores;         // for these queries, by slot, from the loss
  T* dscores_by_key;  // in the order of `lists`
  T* dk;              // (B, S_k, D_I), if the queries come in several parts

  template <class Params>
  static IndexerBackwardWorkspace lay_out(Arena& arena, const Params& p) {
    constexpr bool kIsLoss = std::is_base_of_v<IndexerLossParams, Params>;
    Sizes sizes;
    sizes.batch = p.batch;
    sizes.heads_kv = 1;
    sizes.seqlen_q = p.seqlen_q;
    sizes.seqlen_k = p.seqlen_k;
    KeyIndices indices;
    indices.count = p.chosen ? p.chosen.topk : 0;
    indices.numbers.data = p.chosen.indices;
    indices.stride_b = p.seqlen_q * indices.count;

    IndexerBackwardWorkspace w;
    w.lists = KeyLists::lay_out(arena, sizes, indices);
    const bool fits = p.chosen || p.seqlen_q < kDenseQueries;
    w.queries = fits ? p.seqlen_q : kDenseQueries;
    const int64_t slots = p.batch * w.queries * (p.chosen ? p.chosen.topk : p.seqlen_k);
    w.dscores = arena.take<T>(kIsLoss ? slots : 0);
    w.dscores_by_key = arena.take<T>(p.chosen ? slots : 0);
    w.dk = arena.take<T>(w.queries < p.seqlen_q ? p.batch * p.seqlen_k * p.head_dim : 0);
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::simt
