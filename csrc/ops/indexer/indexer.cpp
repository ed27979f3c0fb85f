// The operators of indexer.h: their schemas, and the keys CPU, CUDA and Meta.
#include "indexer.h"
#include "../declarations/library.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <string>

#include "../../core/arena.h"
#include "../../cpu/select.h"
#include "../checks/checks.h"
#include "../keys/torch_threads.h"

namespace flash_attn_ext::indexer {
namespace {

using at::Tensor;
using c10::SymInt;

auto pass_of(const IndexerTopkParams&) { return &cpu::Kernels::indexer_topk; }
auto pass_of(const IndexerScoresParams&) { return &cpu::Kernels::indexer_scores; }
auto pass_of(const IndexerScoresBackwardParams&) { return &cpu::Kernels::indexer_scores_backward; }
auto pass_of(const IndexerLossParams&) { return &cpu::Kernels::indexer_loss; }
auto pass_of(const IndexerLossBackwardParams&) { return &cpu::Kernels::indexer_loss_backward; }

template <class Params>
void run_on_cpu(const Params& p, const KernelTensors&) {
  constexpr double kSerialProducts = 5e5;
  const double products = double(p.batch) * p.seqlen_q * p.seqlen_k * p.heads * p.head_dim;
  const bool serial = products < kSerialProducts || at::in_parallel_region();
  const cpu::Parallel parallel{serial ? 1 : at::get_num_threads(), run_on_torch_threads};
  const auto& kernels = cpu::active_kernels().*pass_of(p);
  constexpr int64_t kAlignment = Arena::kAlignment;
  const Tensor memory =
      at::empty({static_cast<int64_t>(kernels.workspace(p, parallel.threads)) + kAlignment}, at::kByte);
  const auto address = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
  const auto mask = static_cast<uintptr_t>(kAlignment - 1);
  kernels.run(p, reinterpret_cast<void*>((address + mask) & ~mask), parallel);
}

template <class Params>
void run_on_device(const Params& p, const KernelTensors& tensors) {
  const Tensor& q = tensors.read.front().second;
  if (q.is_cuda())
    run_on_cuda(p, q);
  else
    run_on_cpu(p, tensors);
}

// The numbers in tensors are checked on CPU only. Reading them would make the host wait for a GPU. The GPU's
// kernels ignore numbers outside of the keys.
bool may_read_numbers(const Inputs& in) { return in.q.is_cpu(); }

// ---- indexer_topk ----

void check_topk(const Inputs& in, const SymInt& topk) {
  check_inputs(in);
  constexpr int64_t kMost = int64_t{1} << 31;
  TORCH_CHECK_VALUE(topk >= 0 && topk < kMost, "topk: got ", topk, "; allowed: 0 to 2^31 - 1");
}

TopkResult topk_meta(const Tensor& q, const Tensor& k, const Tensor& weights, const OptionalTensor& key_mask,
                     const OptionalTensor& cache_seqlens, const OptionalTensor& block_table, SymInt topk,
                     double, bool, bool, std::optional<SymInt>, std::optional<SymInt>, SymInt,
                     bool return_scores) {
  const Inputs in{q, k, weights, key_mask, cache_seqlens, block_table};
  check_topk(in, topk);
  return empty_topk(in, topk, return_scores);
}

TopkResult topk_cpu(const Tensor& q, const Tensor& k, const Tensor& weights, const OptionalTensor& key_mask,
                    const OptionalTensor& cache_seqlens, const OptionalTensor& block_table, SymInt topk,
                    double scale, bool causal, bool lower_right, std::optional<SymInt> window_left,
                    std::optional<SymInt> window_right, SymInt diagonal, bool return_scores) {
  const Inputs in{q, k, weights, key_mask, cache_seqlens, block_table};
  check_topk(in, topk);
  check_memory(in);
  check_lengths_and_pages(in);
  const BandOptions band{causal, lower_right, window_left, window_right, diagonal};
  return compute_topk(in, topk.expect_int(), scale, band, return_scores, run_on_cpu<IndexerTopkParams>);
}

// ---- indexer_scores ----

Inputs checked_inputs(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices) {
  const Inputs in{q, k, weights, {}, {}, {}};
  check_inputs(in);
  check_chosen(in, indices);
  return in;
}

void check_contents(const Inputs& in, const Tensor& indices) {
  check_memory(in);
  check_storage("indices", indices);
  if (may_read_numbers(in)) check_key_numbers(in, indices);
}

Tensor scores_meta(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices, double) {
  const Inputs in = checked_inputs(q, k, weights, indices);
  return empty_slots(in, indices.sym_size(3), in.accumulator());
}

Tensor scores(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices, double scale) {
  const Inputs in = checked_inputs(q, k, weights, indices);
  check_contents(in, indices);
  return compute_scores(in, indices, scale, run_on_device<IndexerScoresParams>);
}

Gradients scores_backward_meta(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& weights,
                               const Tensor& indices, double) {
  const Inputs in = checked_inputs(q, k, weights, indices);
  check_rows("grad", grad, in, indices.sym_size(3));
  return empty_gradients(in);
}

Gradients scores_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& weights,
                          const Tensor& indices, double scale) {
  const Inputs in = checked_inputs(q, k, weights, indices);
  check_rows("grad", grad, in, indices.sym_size(3));
  check_contents(in, indices);
  check_storage("grad", grad);
  return compute_scores_backward(grad, in, indices, scale, run_on_device<IndexerScoresBackwardParams>);
}

// ---- indexer_loss ----

void check_contents(const Inputs& in, const MainInputs& main, const OptionalTensor& indices) {
  check_memory(in);
  check_memory(main, indices);
  if (indices && may_read_numbers(in)) check_key_numbers(in, *indices);
}

LossResult loss_meta(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                     const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                     const OptionalTensor& key_mask, double, double, bool, bool, std::optional<SymInt>,
                     std::optional<SymInt>, SymInt) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  check_loss(in, {query, key, lse}, indices);
  return empty_loss(in);
}

LossResult loss(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                const OptionalTensor& key_mask, double scale, double main_scale, bool causal,
                bool lower_right, std::optional<SymInt> window_left, std::optional<SymInt> window_right,
                SymInt diagonal) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  const MainInputs main{query, key, lse};
  check_loss(in, main, indices);
  check_contents(in, main, indices);
  const LossOptions options{scale, main_scale, {causal, lower_right, window_left, window_right, diagonal}};
  return compute_loss(in, main, indices, options, run_on_device<IndexerLossParams>);
}

Gradients loss_backward_meta(const Tensor& grad_loss, const Tensor& index_lse, const Tensor& mass,
                             const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                             const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                             const OptionalTensor& key_mask, double, double, bool, bool,
                             std::optional<SymInt>, std::optional<SymInt>, SymInt) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  check_loss(in, {query, key, lse}, indices);
  check_loss_gradients(in, {grad_loss, index_lse, mass});
  return empty_gradients(in);
}

Gradients loss_backward(const Tensor& grad_loss, const Tensor& index_lse, const Tensor& mass, const Tensor& q,
                        const Tensor& k, const Tensor& weights, const Tensor& query, const Tensor& key,
                        const Tensor& lse, const OptionalTensor& indices, const OptionalTensor& key_mask,
                        double scale, double main_scale, bool causal, bool lower_right,
                        std::optional<SymInt> window_left, std::optional<SymInt> window_right,
                        SymInt diagonal) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  const MainInputs main{query, key, lse};
  const LossGradients grad{grad_loss, index_lse, mass};
  check_loss(in, main, indices);
  check_loss_gradients(in, grad);
  check_contents(in, main, indices);
  check_storage("grad_loss", grad_loss);
  check_storage("index_lse", index_lse);
  check_storage("mass", mass);
  const LossOptions options{scale, main_scale, {causal, lower_right, window_left, window_right, diagonal}};
  return compute_loss_backward(grad, in, main, indices, options, run_on_device<IndexerLossBackwardParams>);
}

constexpr const char* kBand =
    "bool causal=False, bool lower_right=False, SymInt? window_left=None, SymInt? window_right=None, "
    "SymInt diagonal=0";
constexpr const char* kIndexer = "Tensor q, Tensor k, Tensor weights";
constexpr const char* kMain = "Tensor query, Tensor key, Tensor lse, Tensor? indices, Tensor? key_mask";
constexpr const char* kGradients = "(Tensor dq, Tensor dk, Tensor dweights)";

void implement_on_device(torch::Library& m) {
  m.impl("indexer_scores", scores);
  m.impl("indexer_scores_backward", scores_backward);
  m.impl("indexer_loss", loss);
  m.impl("indexer_loss_backward", loss_backward);
}

}  // namespace

FA_LIBRARY_FRAGMENT(m) {
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };
  const std::string band = kBand, in = kIndexer, main = kMain, gradients = kGradients;
  define("indexer_topk(" + in +
         ", Tensor? key_mask, Tensor? cache_seqlens, Tensor? block_table, SymInt topk, *, float scale, " +
         band + ", bool return_scores=False) -> (Tensor indices, Tensor scores)");
  define("indexer_scores(" + in + ", Tensor indices, *, float scale) -> Tensor");
  define("indexer_scores_backward(Tensor grad, " + in + ", Tensor indices, *, float scale) -> " + gradients);
  define("indexer_loss(" + in + ", " + main + ", *, float scale, float main_scale, " + band +
         ") -> (Tensor loss, Tensor index_lse, Tensor mass)");
  define("indexer_loss_backward(Tensor grad_loss, Tensor index_lse, Tensor mass, " + in + ", " + main +
         ", *, float scale, float main_scale, " + band + ") -> " + gradients);
}

FA_LIBRARY_IMPL(CPU, m) {
  m.impl("indexer_topk", topk_cpu);
  implement_on_device(m);
}

FA_LIBRARY_IMPL(CUDA, m) { implement_on_device(m); }

FA_LIBRARY_IMPL(Meta, m) {
  m.impl("indexer_topk", topk_meta);
  m.impl("indexer_scores", scores_meta);
  m.impl("indexer_scores_backward", scores_backward_meta);
  m.impl("indexer_loss", loss_meta);
  m.impl("indexer_loss_backward", loss_backward_meta);
}

}  // namespace flash_attn_ext::indexer
