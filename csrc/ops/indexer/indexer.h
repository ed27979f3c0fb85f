// Declares the operators of the indexer (core/indexer.h has the formula). CPU only.
//
//   indexer_topk              the keys with the largest scores of each query; from tensors, caches and pages
//   indexer_scores            the scores at chosen keys; differentiable
//   indexer_loss              for each query, the KL divergence of the indexer from the main attention; differentiable
//   ..._backward              their gradients for q, k and weights
//
// The derivatives are registered in flash_attn_ext/indexer/_autograd.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../../core/indexer.h"

namespace flash_attn_ext::indexer {

using OptionalTensor = std::optional<at::Tensor>;

// The tensors of the indexer.
struct Inputs {
  at::Tensor q, k, weights;      // (B, H_I, S_q, D_I), (B, S_k, D_I), (B, S_q, H_I)
  OptionalTensor key_mask;       // (B, S_k) bool
  OptionalTensor cache_seqlens;  // (B): k is a cache, with so many keys of each sequence
  OptionalTensor block_table;    // (B, blocks): k is pages (pages, page_size, D_I)

  at::ScalarType accumulator() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
  // The rows of keys that a sequence can have.
  c10::SymInt seqlen_k() const {
    return block_table ? k.sym_size(1) * block_table->sym_size(1) : k.sym_size(1);
  }
};

// The keys that a query sees by position. The options mean the same as in attention.
struct BandOptions {
  bool causal = false, lower_right = false;
  std::optional<c10::SymInt> window_left = std::nullopt, window_right = std::nullopt;
  c10::SymInt diagonal = 0;
};

// The tensors of the main attention, for the loss.
struct MainInputs {
  at::Tensor query, key, lse;  // (B, H, S_q, D), (B, H_kv, S_k, D), (B, H, S_q)
};

// Each function raises an error that names the argument. They check shapes and dtypes, also of tensors without data.
void check_inputs(const Inputs& in);
void check_chosen(const Inputs& in, const at::Tensor& indices);
// t: (B, S_q), or (B, S_q, columns), in the accumulator's dtype.
void check_rows(const char* name, const at::Tensor& t, const Inputs& in,
                const std::optional<c10::SymInt>& columns = std::nullopt);
void check_main(const Inputs& in, const MainInputs& main);
// These functions also read the numbers in the tensors.
void check_lengths_and_pages(const Inputs& in);
void check_key_numbers(const Inputs& in, const at::Tensor& indices);

}  // namespace flash_attn_ext::indexer
