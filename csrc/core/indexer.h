// The arguments of the indexer's kernels. DeepSeek sparse attention (V3.2, 2025) has a small scorer, the lightning
// indexer, which chooses the keys of each query:
//
//   score[i][j] = sum_h weights[i][h] relu(scale <q[i][h], k[j]>)
//
// H_I and D_I are its heads and its head dimension. All heads share one row of k. "acc" is float, or double for double.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_attn_ext {

struct IndexerParams {
  DType dtype = DType::kFloat32;  // of q and k
  int64_t batch = 0, heads = 0, seqlen_q = 0, seqlen_k = 0, head_dim = 0;
  Tensor4 q;                      // (B, H_I, S_q, D_I)
  Tensor4 k;                      // (B, S_k, D_I), or pages (pages, page_size, D_I); stride_h is not used
  const void* weights = nullptr;  // (B, S_q, H_I) acc, contiguous
  double scale = 1;
  Band band;                             // diagonal of a batch element without `lengths`
  const bool* key_mask = nullptr;        // (B, S_k) contiguous, true: visible; null: all
  const int64_t* lengths = nullptr;      // (B) keys of each batch element; null: S_k
  bool lower_right = false;              // adds lengths[b] - S_q to the diagonal
  const int64_t* block_table = nullptr;  // (B, blocks) contiguous; null: k is no pages
  int64_t blocks = 0, page_size = 0;

  FA_HOST_DEVICE int64_t keys_of(int64_t b) const { return lengths ? lengths[b] : seqlen_k; }
  FA_HOST_DEVICE Band band_of(int64_t b) const {
    Band own = band;
    if (lower_right) own.diagonal += keys_of(b) - seqlen_q;
    return own;
  }
  FA_HOST_DEVICE bool key_is_visible(int64_t b, int64_t j) const {
    return !key_mask || key_mask[b * seqlen_k + j];
  }
  // The row of key j in memory, counted in rows of k's stride from `data`.
  template <class T>
  const T* key_row(int64_t b, int64_t j) const {
    if (!block_table) return k.row<T>(b, 0, j);
    return k.row<T>(block_table[b * blocks + j / page_size], 0, j % page_size);
  }
};

struct IndexerTopkParams : IndexerParams {
  int64_t topk = 0;
  int32_t* indices = nullptr;  // (B, S_q, topk): ascending, then -1
  void* scores = nullptr;      // (B, S_q, topk) acc, -inf for -1; null: not wanted
};

// Keys that a caller has chosen.
struct ChosenKeys {
  const int32_t* indices = nullptr;  // (B, S_q, topk), -1: none
  int64_t topk = -1;                 // -1: nothing is chosen. With 0 slots each query has no keys.

  FA_HOST_DEVICE explicit operator bool() const { return topk >= 0; }
};

struct IndexerScoresParams : IndexerParams {
  ChosenKeys chosen;
  void* scores = nullptr;  // (B, S_q, topk) acc
};

// Gradients of the indexer's tensors.
struct IndexerGradients {
  Tensor4 dq, dk;            // of q and k, in their dtype
  void* dweights = nullptr;  // (B, S_q, H_I) acc, contiguous
};

struct IndexerScoresBackwardParams : IndexerParams {
  ChosenKeys chosen;
  const void* dscores = nullptr;  // (B, S_q, topk) acc
  IndexerGradients gradients;
};

// KL(target_i || softmax_j score[i][j]). target: the main attention's probabilities, summed over the heads, and
// divided by their sum over the row, `mass`.
struct IndexerLossParams : IndexerParams {
  ChosenKeys chosen;  // none: the row is all visible keys
  int64_t main_heads = 0, main_heads_kv = 0, main_head_dim = 0;
  Tensor4 query, key;         // of the main attention, in `dtype`
  const void* lse = nullptr;  // (B, H, S_q) acc, contiguous
  double main_scale = 1;
  // (B, S_q) acc, contiguous. The backward reads index_lse and mass; its `loss` is null.
  void* loss = nullptr;
  void* index_lse = nullptr;
  void* mass = nullptr;
};

struct IndexerLossBackwardParams : IndexerLossParams {
  const void* dloss = nullptr;  // (B, S_q) acc, contiguous
  IndexerGradients gradients;
};

}  // namespace flash_attn_ext
