// The operators of indexer.h for the keys CPU and Meta: check, allocate, pack, run.
#include "indexer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

#include "../../core/arena.h"
#include "../../cpu/select.h"
#include "../checks/checks.h"
#include "../dense/pack_params.h"
#include "../keys/torch_threads.h"

namespace flash_attn_ext::indexer {
namespace {

using at::Tensor;
using c10::SymInt;

// (dq, dk, dweights) in the shapes and dtypes of the inputs.
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Tensor empty_rows(const Inputs& in, at::ScalarType dtype) {
  return at::empty_symint({in.q.sym_size(0), in.q.sym_size(2)}, in.q.options().dtype(dtype));
}
Tensor empty_slots(const Inputs& in, const SymInt& topk, at::ScalarType dtype) {
  return at::empty_symint({in.q.sym_size(0), SymInt(1), in.q.sym_size(2), topk}, in.q.options().dtype(dtype));
}
Gradients empty_gradients(const Inputs& in) {
  return {at::empty_symint(in.q.sym_sizes(), in.q.options()),
          at::empty_symint(in.k.sym_sizes(), in.k.options()),
          at::empty_symint(in.weights.sym_sizes(), in.weights.options())};
}

// The inputs in the form that kernels read: contiguous rows, and copies of weights and numbers in one dtype.
struct KernelInputs {
  Tensor q, k, weights, key_mask, lengths, block_table;

  explicit KernelInputs(const Inputs& in)
      : q(rows_of(in.q)),
        k(rows_of(in.k)),
        weights(in.weights.to(in.accumulator()).contiguous()),
        key_mask(in.key_mask ? in.key_mask->contiguous() : Tensor()),
        lengths(in.cache_seqlens ? in.cache_seqlens->to(at::kLong).contiguous() : Tensor()),
        block_table(in.block_table ? in.block_table->to(at::kLong).contiguous() : Tensor()) {}

  static Tensor rows_of(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }
};

void check_memory(const Inputs& in) {
  check_storage("q", in.q);
  check_storage("k", in.k);
  check_storage("weights", in.weights);
  if (in.key_mask) check_storage("key_mask", *in.key_mask);
  if (in.cache_seqlens) check_storage("cache_seqlens", *in.cache_seqlens);
  if (in.block_table) check_storage("block_table", *in.block_table);
}

Tensor4 pack_heads(const Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}
Tensor4 pack_keys(const Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), 0, t.stride(1)};
}

// Clamps a side of the band to kUnbounded, which is no limit.
int64_t clamped(const SymInt& x) { return std::clamp(x.expect_int(), -Band::kUnbounded, Band::kUnbounded); }

void pack_inputs(IndexerParams& p, const KernelInputs& in, const BandOptions& band, double scale) {
  p.dtype = pack_dtype(in.q.scalar_type());
  p.batch = in.q.size(0);
  p.heads = in.q.size(1);
  p.seqlen_q = in.q.size(2);
  p.head_dim = in.q.size(3);
  p.seqlen_k = in.k.size(1);
  p.q = pack_heads(in.q);
  p.k = pack_keys(in.k);
  p.weights = in.weights.const_data_ptr();
  p.scale = scale;
  if (in.key_mask.defined()) p.key_mask = in.key_mask.const_data_ptr<bool>();
  if (in.lengths.defined()) p.lengths = in.lengths.const_data_ptr<int64_t>();
  if (in.block_table.defined()) {
    p.block_table = in.block_table.const_data_ptr<int64_t>();
    p.blocks = in.block_table.size(1);
    p.page_size = in.k.size(1);
    p.k.stride_b = in.k.stride(0);
    p.seqlen_k = p.blocks * p.page_size;
  }
  p.lower_right = band.lower_right;
  p.band.diagonal = clamped(band.diagonal);
  if (band.window_left) p.band.left = clamped(*band.window_left);
  if (band.window_right) p.band.right = clamped(*band.window_right);
  if (band.causal) p.band.right = std::min<int64_t>(p.band.right, 0);
}

template <class Params>
void run(cpu::Pass<Params> cpu::Kernels::* pass, const Params& p) {
  constexpr double kSerialProducts = 5e5;
  const double products = double(p.batch) * p.seqlen_q * p.seqlen_k * p.heads * p.head_dim;
  const bool serial = products < kSerialProducts || at::in_parallel_region();
  const cpu::Parallel parallel{serial ? 1 : at::get_num_threads(), run_on_torch_threads};
  const auto& kernels = cpu::active_kernels().*pass;
  constexpr int64_t kAlignment = Arena::kAlignment;
  const Tensor memory =
      at::empty({static_cast<int64_t>(kernels.workspace(p, parallel.threads)) + kAlignment}, at::kByte);
  const auto address = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
  const auto mask = static_cast<uintptr_t>(kAlignment - 1);
  kernels.run(p, reinterpret_cast<void*>((address + mask) & ~mask), parallel);
}

struct Indices {
  Tensor int32;
  explicit Indices(const Tensor& given) : int32(given.to(at::kInt).contiguous()) {}
  ChosenKeys pack() const { return {int32.const_data_ptr<int32_t>(), int32.size(3)}; }
};

// Kernels write the gradient of the weights in the accumulator's dtype.
template <class Params>
void run_backward(cpu::Pass<Params> cpu::Kernels::* pass, Params& p, const Inputs& in,
                  const Gradients& result) {
  const auto& [dq, dk, dweights] = result;
  if (in.q.numel() == 0 || in.k.numel() == 0) {
    dq.zero_();
    dk.zero_();
    dweights.zero_();
    return;
  }
  const Tensor wide = at::empty(dweights.sizes(), dweights.options().dtype(in.accumulator()));
  p.gradients = {pack_heads(dq), pack_keys(dk), wide.mutable_data_ptr()};
  run(pass, p);
  dweights.copy_(wide);
}

// ---- indexer_topk ----

void check_topk(const Inputs& in, const SymInt& topk) {
  check_inputs(in);
  constexpr int64_t kMost = int64_t{1} << 31;
  TORCH_CHECK_VALUE(topk >= 0 && topk < kMost, "topk: got ", topk, "; allowed: 0 to 2^31 - 1");
}

using TopkResult = std::tuple<Tensor, Tensor>;

TopkResult empty_topk(const Inputs& in, const SymInt& topk, bool return_scores) {
  return {empty_slots(in, topk, at::kInt), return_scores
                                               ? empty_slots(in, topk, in.accumulator())
                                               : at::empty({0}, in.q.options().dtype(in.accumulator()))};
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
  const TopkResult result = empty_topk(in, topk, return_scores);
  const auto& [indices, scores] = result;
  const KernelInputs packed(in);
  IndexerTopkParams p;
  pack_inputs(p, packed, {causal, lower_right, window_left, window_right, diagonal}, scale);
  if (indices.numel() == 0 || p.seqlen_k == 0) {
    indices.fill_(-1);
    scores.fill_(-std::numeric_limits<double>::infinity());
    return result;
  }
  p.topk = topk.expect_int();
  p.indices = indices.mutable_data_ptr<int32_t>();
  p.scores = return_scores ? scores.mutable_data_ptr() : nullptr;
  run(&cpu::Kernels::indexer_topk, p);
  return result;
}

// ---- indexer_scores ----

Tensor scores_meta(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices, double) {
  const Inputs in{q, k, weights, {}, {}, {}};
  check_inputs(in);
  check_chosen(in, indices);
  return empty_slots(in, indices.sym_size(3), in.accumulator());
}

Tensor scores_cpu(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& indices,
                  double scale) {
  const Inputs in{q, k, weights, {}, {}, {}};
  const Tensor scores = scores_meta(q, k, weights, indices, scale);
  check_memory(in);
  check_storage("indices", indices);
  check_key_numbers(in, indices);
  if (scores.numel() == 0 || k.size(1) == 0) return scores.fill_(-std::numeric_limits<double>::infinity());
  const KernelInputs packed(in);
  const Indices chosen(indices);
  IndexerScoresParams p;
  pack_inputs(p, packed, {}, scale);
  p.chosen = chosen.pack();
  p.scores = scores.mutable_data_ptr();
  run(&cpu::Kernels::indexer_scores, p);
  return scores;
}

Gradients scores_backward_meta(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& weights,
                               const Tensor& indices, double) {
  const Inputs in{q, k, weights, {}, {}, {}};
  check_inputs(in);
  check_chosen(in, indices);
  check_rows("grad", grad, in, indices.sym_size(3));
  return empty_gradients(in);
}

Gradients scores_backward_cpu(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& weights,
                              const Tensor& indices, double scale) {
  const Inputs in{q, k, weights, {}, {}, {}};
  const Gradients result = scores_backward_meta(grad, q, k, weights, indices, scale);
  check_memory(in);
  check_storage("indices", indices);
  check_storage("grad", grad);
  check_key_numbers(in, indices);
  const KernelInputs packed(in);
  const Indices chosen(indices);
  const Tensor dscores = grad.contiguous();
  IndexerScoresBackwardParams p;
  pack_inputs(p, packed, {}, scale);
  p.chosen = chosen.pack();
  p.dscores = dscores.const_data_ptr();
  run_backward(&cpu::Kernels::indexer_scores_backward, p, in, result);
  return result;
}

// ---- indexer_loss ----

using LossResult = std::tuple<Tensor, Tensor, Tensor>;  // loss, index_lse, mass

void check_loss(const Inputs& in, const MainInputs& main, const OptionalTensor& indices) {
  check_inputs(in);
  check_main(in, main);
  if (indices) check_chosen(in, *indices);
}

// The tensors of the main attention in the form that kernels read.
struct KernelMain {
  Tensor query, key, lse;
  std::optional<Indices> indices;

  KernelMain(const MainInputs& main, const OptionalTensor& chosen)
      : query(KernelInputs::rows_of(main.query)),
        key(KernelInputs::rows_of(main.key)),
        lse(main.lse.contiguous()) {
    if (chosen) indices.emplace(*chosen);
  }
};

void check_loss_contents(const Inputs& in, const MainInputs& main, const OptionalTensor& indices) {
  check_memory(in);
  check_storage("query", main.query);
  check_storage("key", main.key);
  check_storage("lse", main.lse);
  if (!indices) return;
  check_storage("indices", *indices);
  check_key_numbers(in, *indices);
}

void pack_loss(IndexerLossParams& p, const KernelInputs& in, const KernelMain& main, const BandOptions& band,
               double scale, double main_scale) {
  pack_inputs(p, in, band, scale);
  if (main.indices) p.chosen = main.indices->pack();
  p.main_heads = main.query.size(1);
  p.main_heads_kv = main.key.size(1);
  p.main_head_dim = main.query.size(3);
  p.query = pack_heads(main.query);
  p.key = pack_heads(main.key);
  p.lse = main.lse.const_data_ptr();
  p.main_scale = main_scale;
}

LossResult loss_meta(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                     const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                     const OptionalTensor& key_mask, double, double, bool, bool, std::optional<SymInt>,
                     std::optional<SymInt>, SymInt) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  check_loss(in, {query, key, lse}, indices);
  const at::ScalarType dtype = in.accumulator();
  return {empty_rows(in, dtype), empty_rows(in, dtype), empty_rows(in, dtype)};
}

LossResult loss_cpu(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                    const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                    const OptionalTensor& key_mask, double scale, double main_scale, bool causal,
                    bool lower_right, std::optional<SymInt> window_left, std::optional<SymInt> window_right,
                    SymInt diagonal) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  const MainInputs main{query, key, lse};
  const LossResult result = loss_meta(q, k, weights, query, key, lse, indices, key_mask, scale, main_scale,
                                      causal, lower_right, window_left, window_right, diagonal);
  check_loss_contents(in, main, indices);
  const auto& [loss, index_lse, mass] = result;
  if (q.numel() == 0 || k.numel() == 0) {
    loss.zero_();
    index_lse.fill_(-std::numeric_limits<double>::infinity());
    mass.zero_();
    return result;
  }
  const KernelInputs packed(in);
  const KernelMain packed_main(main, indices);
  IndexerLossParams p;
  pack_loss(p, packed, packed_main, {causal, lower_right, window_left, window_right, diagonal}, scale,
            main_scale);
  p.loss = loss.mutable_data_ptr();
  p.index_lse = index_lse.mutable_data_ptr();
  p.mass = mass.mutable_data_ptr();
  run(&cpu::Kernels::indexer_loss, p);
  return result;
}

Gradients loss_backward_meta(const Tensor& grad_loss, const Tensor& index_lse, const Tensor& mass,
                             const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                             const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                             const OptionalTensor& key_mask, double, double, bool, bool,
                             std::optional<SymInt>, std::optional<SymInt>, SymInt) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  check_loss(in, {query, key, lse}, indices);
  check_rows("grad_loss", grad_loss, in);
  check_rows("index_lse", index_lse, in);
  check_rows("mass", mass, in);
  return empty_gradients(in);
}

Gradients loss_backward_cpu(const Tensor& grad_loss, const Tensor& index_lse, const Tensor& mass,
                            const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& query,
                            const Tensor& key, const Tensor& lse, const OptionalTensor& indices,
                            const OptionalTensor& key_mask, double scale, double main_scale, bool causal,
                            bool lower_right, std::optional<SymInt> window_left,
                            std::optional<SymInt> window_right, SymInt diagonal) {
  const Inputs in{q, k, weights, key_mask, {}, {}};
  const MainInputs main{query, key, lse};
  const Gradients result =
      loss_backward_meta(grad_loss, index_lse, mass, q, k, weights, query, key, lse, indices, key_mask, scale,
                         main_scale, causal, lower_right, window_left, window_right, diagonal);
  check_loss_contents(in, main, indices);
  check_storage("grad_loss", grad_loss);
  check_storage("index_lse", index_lse);
  check_storage("mass", mass);
  const KernelInputs packed(in);
  const KernelMain packed_main(main, indices);
  const Tensor dloss = grad_loss.contiguous(), of_index = index_lse.contiguous(), of_main = mass.contiguous();
  IndexerLossBackwardParams p;
  pack_loss(p, packed, packed_main, {causal, lower_right, window_left, window_right, diagonal}, scale,
            main_scale);
  p.index_lse = const_cast<void*>(of_index.const_data_ptr());
  p.mass = const_cast<void*>(of_main.const_data_ptr());
  p.dloss = dloss.const_data_ptr();
  run_backward(&cpu::Kernels::indexer_loss_backward, p, in, result);
  return result;
}

constexpr const char* kBand =
    "bool causal=False, bool lower_right=False, SymInt? window_left=None, SymInt? window_right=None, "
    "SymInt diagonal=0";
constexpr const char* kIndexer = "Tensor q, Tensor k, Tensor weights";
constexpr const char* kMain = "Tensor query, Tensor key, Tensor lse, Tensor? indices, Tensor? key_mask";
constexpr const char* kGradients = "(Tensor dq, Tensor dk, Tensor dweights)";

}  // namespace

TORCH_LIBRARY_FRAGMENT(flash_attn_ext, m) {
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

TORCH_LIBRARY_IMPL(flash_attn_ext, CPU, m) {
  m.impl("indexer_topk", topk_cpu);
  m.impl("indexer_scores", scores_cpu);
  m.impl("indexer_scores_backward", scores_backward_cpu);
  m.impl("indexer_loss", loss_cpu);
  m.impl("indexer_loss_backward", loss_backward_cpu);
}

TORCH_LIBRARY_IMPL(flash_attn_ext, Meta, m) {
  m.impl("indexer_topk", topk_meta);
  m.impl("indexer_scores", scores_meta);
  m.impl("indexer_scores_backward", scores_backward_meta);
  m.impl("indexer_loss", loss_meta);
  m.impl("indexer_loss_backward", loss_backward_meta);
}

}  // namespace flash_attn_ext::indexer
