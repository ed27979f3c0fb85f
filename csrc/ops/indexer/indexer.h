// Declares the operators of the indexer (core/indexer.h has the formula). On CUDA indexer_topk is written in Python.
//
//   indexer_topk              the keys with the largest scores of each query; from tensors, caches and pages
//   indexer_scores            the scores at chosen keys; differentiable
//   indexer_loss              for each query, the KL divergence of the indexer from the main attention; differentiable
//   ..._backward              their gradients for q, k and weights
//
// The derivatives are registered in flash_attn_ext/indexer/_autograd.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

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

using TopkResult = std::tuple<at::Tensor, at::Tensor>;              // indices, scores
using LossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // loss, index_lse, mass
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;   // dq, dk, dweights

// Tensors that the forward of the loss has saved, and the gradient of the loss.
struct LossGradients {
  at::Tensor grad_loss, index_lse, mass;  // (B, S_q) each
};

// The factors of <q, k> and of <query, key>, and the keys that a query sees.
struct LossOptions {
  double scale, main_scale;
  BandOptions band;
};

// Each function raises an error that names the argument. They check shapes and dtypes, also of tensors without data.
void check_inputs(const Inputs& in);
void check_chosen(const Inputs& in, const at::Tensor& indices);
// t: (B, S_q), or (B, S_q, columns), in the accumulator's dtype.
void check_rows(const char* name, const at::Tensor& t, const Inputs& in,
                const std::optional<c10::SymInt>& columns = std::nullopt);
void check_main(const Inputs& in, const MainInputs& main);
void check_loss(const Inputs& in, const MainInputs& main, const OptionalTensor& indices);
void check_loss_gradients(const Inputs& in, const LossGradients& grad);
// Checks that the memory of the tensors has not been freed.
void check_memory(const Inputs& in);
void check_memory(const MainInputs& main, const OptionalTensor& indices);
// These functions also read the numbers in the tensors.
void check_lengths_and_pages(const Inputs& in);
void check_key_numbers(const Inputs& in, const at::Tensor& indices);

// The tensors behind the pointers of packed params, by name. The first one that is read is q.
struct KernelTensors {
  std::vector<std::pair<const char*, at::Tensor>> read, written;
};

// Runs kernels on packed params: the kernels of a device, or of a test (tests/cuda_host).
template <class Params>
using Run = std::function<void(const Params&, const KernelTensors&)>;

// Allocates results in the shapes that Meta gives.
at::Tensor empty_slots(const Inputs& in, const c10::SymInt& topk, at::ScalarType dtype);
TopkResult empty_topk(const Inputs& in, const c10::SymInt& topk, bool return_scores);
LossResult empty_loss(const Inputs& in);
Gradients empty_gradients(const Inputs& in);

// Each function allocates the results, packs the params and runs them. The arguments are checked.
TopkResult compute_topk(const Inputs& in, int64_t topk, double scale, const BandOptions& band,
                        bool return_scores, const Run<IndexerTopkParams>& run);
at::Tensor compute_scores(const Inputs& in, const at::Tensor& indices, double scale,
                          const Run<IndexerScoresParams>& run);
Gradients compute_scores_backward(const at::Tensor& grad, const Inputs& in, const at::Tensor& indices,
                                  double scale, const Run<IndexerScoresBackwardParams>& run);
LossResult compute_loss(const Inputs& in, const MainInputs& main, const OptionalTensor& indices,
                        const LossOptions& options, const Run<IndexerLossParams>& run);
Gradients compute_loss_backward(const LossGradients& grad, const Inputs& in, const MainInputs& main,
                                const OptionalTensor& indices, const LossOptions& options,
                                const Run<IndexerLossBackwardParams>& run);

// The kernels of the CUDA key, on q's device.
void run_on_cuda(const IndexerScoresParams& p, const at::Tensor& q);
void run_on_cuda(const IndexerScoresBackwardParams& p, const at::Tensor& q);
void run_on_cuda(const IndexerLossParams& p, const at::Tensor& q);
void run_on_cuda(const IndexerLossBackwardParams& p, const at::Tensor& q);

}  // namespace flash_attn_ext::indexer
