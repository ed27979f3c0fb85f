// A tile of attention by index for few heads of a key head, in decode's form (decode_lanes-inl.h). In the softmax one
// vector has several keys of each head. In the products it has several columns of each head. The scores have the same
// bits as in the backward.
#pragma once

#include "indexed_tile-inl.h"

// Returns whether only the softmax follows the product of few heads. Otherwise the tile has the forward's form.
template <class T>
bool stays_in_lanes(const AttentionParams& p) {
  return are_few_heads<T>(p.sizes.heads / p.sizes.heads_kv) && !p.mask && !p.alibi && !p.dropout &&
         p.softcap == 0;
}

// O, m and l of the heads of one query row.
template <class T>
struct HeadResults {
  T *out, *row_max, *row_sum;
  int64_t ld;  // of out: decode_columns()
};

// Adds the tile `row.k`, `row.v` of `keys` keys to the results. `scores`: memory for [whole chunks of keys][lanes].
// `rescale`: memory for one vector. Nothing is prefetched, because the copies of a gather already use all loads in
// flight that the core allows.
template <class In, class T>
void add_tile_of_few_heads(const AttentionParams& row, const HeadScores<In, T>& products, int64_t keys,
                           T* scores, T* rescale, const HeadResults<T>& r) {
  const int64_t heads = row.sizes.seqlen_q, lanes = lanes_of<T>(rows_of_few_heads<T>(heads));
  const int64_t padded = whole_chunks(keys);
  for (int64_t j = 0; j < keys; j += kChunkRows)
    products.scores_of_chunk(row, j, keys, product_scale<T>(row), scores + j * lanes);
  if (lanes < kLanes<T>) {
    decode_softmax_part_of_vector<T, T>(scores, keys, padded, lanes, nullptr, r.row_max, r.row_sum, heads,
                                        r.out, r.ld,
                                        ProbsInPlace<T>{scores, kLanes<T>, padded * lanes / kLanes<T>});
  } else {
    decode_softmax_lanes<T, T>(scores, keys, lanes, nullptr, r.row_max, r.row_sum, heads, rescale,
                               [&](int64_t row) { return ProbsInPlace<T>{scores + row, lanes, keys}; });
    for (int64_t h = 0; h < heads; ++h) multiply_row<T>(r.out + h * r.ld, rescale[h], r.ld);
    std::fill(scores + keys * lanes, scores + padded * lanes, T(0));  // pads pairs with zeros
  }
  const auto chunk = [&](int64_t j) {
    return Rows<In>{row.v.row<In>(0, 0, j), row.v.stride_s, row.sizes.head_dim_v};
  };
  Prefetcher nothing;
  products.few.add_values({scores, lanes, true, nullptr}, heads, chunk, false, keys, r.out, r.ld, nothing);
}
