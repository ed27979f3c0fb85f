// The operators of the indexer on every device: allocate, pack, run.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "../checks/checks.h"
#include "../dense/pack_params.h"
#include "indexer.h"

namespace flash_attn_ext::indexer {
namespace {

using at::Tensor;
using c10::SymInt;

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

  // The tensors by name, for a Run.
  KernelTensors named() const {
    KernelTensors tensors;
    tensors.read = {{"q", q}, {"k", k}, {"weights", weights}};
    for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"key_mask", key_mask},
                                  {"lengths", lengths},
                                  {"block_table", block_table}})
      if (t.defined()) tensors.read.emplace_back(name, t);
    return tensors;
  }

  static Tensor rows_of(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }
};

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

// Numbers of chosen keys. Numbers that int32 does not hold stay outside of the keys.
struct Indices {
  Tensor int32;
  explicit Indices(const Tensor& given) {
    const bool is_wide = given.scalar_type() == at::kLong;
    int32 =
        (is_wide ? given.clamp(-1, std::numeric_limits<int32_t>::max()).to(at::kInt) : given).contiguous();
  }
  ChosenKeys pack() const { return {int32.const_data_ptr<int32_t>(), int32.size(3)}; }
};

// Kernels write the gradient of the weights in the accumulator's dtype.
template <class Params>
void run_backward(Params& p, const Inputs& in, const Gradients& result, KernelTensors tensors,
                  const Run<Params>& run) {
  const auto& [dq, dk, dweights] = result;
  if (in.q.numel() == 0 || in.k.numel() == 0) {
    dq.zero_();
    dk.zero_();
    dweights.zero_();
    return;
  }
  const Tensor wide = at::empty(dweights.sizes(), dweights.options().dtype(in.accumulator()));
  p.gradients = {pack_heads(dq), pack_keys(dk), wide.mutable_data_ptr()};
  tensors.written = {{"dq", dq}, {"dk", dk}, {"dweights", wide}};
  run(p, tensors);
  dweights.copy_(wide);
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
  void add_to(KernelTensors& tensors) const {
    tensors.read.insert(tensors.read.end(), {{"query", query}, {"key", key}, {"lse", lse}});
    if (indices) tensors.read.emplace_back("indices", indices->int32);
  }
};

void pack_loss(IndexerLossParams& p, const KernelInputs& in, const KernelMain& main,
               const LossOptions& options) {
  pack_inputs(p, in, options.band, options.scale);
  if (main.indices) p.chosen = main.indices->pack();
  p.main_heads = main.query.size(1);
  p.main_heads_kv = main.key.size(1);
  p.main_head_dim = main.query.size(3);
  p.query = pack_heads(main.query);
  p.key = pack_heads(main.key);
  p.lse = main.lse.const_data_ptr();
  p.main_scale = options.main_scale;
}

Tensor empty_rows(const Inputs& in, at::ScalarType dtype) {
  return at::empty_symint({in.q.sym_size(0), in.q.sym_size(2)}, in.q.options().dtype(dtype));
}

}  // namespace

Tensor empty_slots(const Inputs& in, const SymInt& topk, at::ScalarType dtype) {
  return at::empty_symint({in.q.sym_size(0), SymInt(1), in.q.sym_size(2), topk}, in.q.options().dtype(dtype));
}

TopkResult empty_topk(const Inputs& in, const SymInt& topk, bool return_scores) {
  return {empty_slots(in, topk, at::kInt), return_scores
                                               ? empty_slots(in, topk, in.accumulator())
                                               : at::empty({0}, in.q.options().dtype(in.accumulator()))};
}

LossResult empty_loss(const Inputs& in) {
  const at::ScalarType dtype = in.accumulator();
  return {empty_rows(in, dtype), empty_rows(in, dtype), empty_rows(in, dtype)};
}

Gradients empty_gradients(const Inputs& in) {
  return {at::empty_symint(in.q.sym_sizes(), in.q.options()),
          at::empty_symint(in.k.sym_sizes(), in.k.options()),
          at::empty_symint(in.weights.sym_sizes(), in.weights.options())};
}

TopkResult compute_topk(const Inputs& in, int64_t topk, double scale, const BandOptions& band,
                        bool return_scores, const Run<IndexerTopkParams>& run) {
  const TopkResult result = empty_topk(in, topk, return_scores);
  const auto& [indices, scores] = result;
  const KernelInputs packed(in);
  IndexerTopkParams p;
  pack_inputs(p, packed, band, scale);
  if (indices.numel() == 0 || p.seqlen_k == 0) {
    indices.fill_(-1);
    scores.fill_(-std::numeric_limits<double>::infinity());
    return result;
  }
  p.topk = topk;
  p.indices = indices.mutable_data_ptr<int32_t>();
  p.scores = return_scores ? scores.mutable_data_ptr() : nullptr;
  KernelTensors tensors = packed.named();
  tensors.written = {{"indices", indices}, {"scores", scores}};
  run(p, tensors);
  return result;
}

Tensor compute_scores(const Inputs& in, const Tensor& indices, double scale,
                      const Run<IndexerScoresParams>& run) {
  const Tensor scores = empty_slots(in, indices.sym_size(3), in.accumulator());
  if (scores.numel() == 0 || in.k.size(1) == 0) return scores.fill_(-std::numeric_limits<double>::infinity());
  const KernelInputs packed(in);
  const Indices chosen(indices);
  IndexerScoresParams p;
  pack_inputs(p, packed, {}, scale);
  p.chosen = chosen.pack();
  p.scores = scores.mutable_data_ptr();
  KernelTensors tensors = packed.named();
  tensors.read.emplace_back("indices", chosen.int32);
  tensors.written = {{"scores", scores}};
  run(p, tensors);
  return scores;
}

Gradients compute_scores_backward(const Tensor& grad, const Inputs& in, const Tensor& indices, double scale,
                                  const Run<IndexerScoresBackwardParams>& run) {
  const Gradients result = empty_gradients(in);
  const KernelInputs packed(in);
  const Indices chosen(indices);
  const Tensor dscores = grad.contiguous();
  IndexerScoresBackwardParams p;
  pack_inputs(p, packed, {}, scale);
  p.chosen = chosen.pack();
  p.dscores = dscores.const_data_ptr();
  KernelTensors tensors = packed.named();
  tensors.read.insert(tensors.read.end(), {{"indices", chosen.int32}, {"grad", dscores}});
  run_backward(p, in, result, tensors, run);
  return result;
}

LossResult compute_loss(const Inputs& in, const MainInputs& main, const OptionalTensor& indices,
                        const LossOptions& options, const Run<IndexerLossParams>& run) {
  const LossResult result = empty_loss(in);
  const auto& [loss, index_lse, mass] = result;
  if (in.q.numel() == 0 || in.k.numel() == 0) {
    loss.zero_();
    index_lse.fill_(-std::numeric_limits<double>::infinity());
    mass.zero_();
    return result;
  }
  const KernelInputs packed(in);
  const KernelMain packed_main(main, indices);
  IndexerLossParams p;
  pack_loss(p, packed, packed_main, options);
  p.loss = loss.mutable_data_ptr();
  p.index_lse = index_lse.mutable_data_ptr();
  p.mass = mass.mutable_data_ptr();
  KernelTensors tensors = packed.named();
  packed_main.add_to(tensors);
  tensors.written = {{"loss", loss}, {"index_lse", index_lse}, {"mass", mass}};
  run(p, tensors);
  return result;
}

Gradients compute_loss_backward(const LossGradients& grad, const Inputs& in, const MainInputs& main,
                                const OptionalTensor& indices, const LossOptions& options,
                                const Run<IndexerLossBackwardParams>& run) {
  const Gradients result = empty_gradients(in);
  const KernelInputs packed(in);
  const KernelMain packed_main(main, indices);
  const Tensor dloss = grad.grad_loss.contiguous(), of_index = grad.index_lse.contiguous(),
               of_main = grad.mass.contiguous();
  IndexerLossBackwardParams p;
  pack_loss(p, packed, packed_main, options);
  p.index_lse = const_cast<void*>(of_index.const_data_ptr());
  p.mass = const_cast<void*>(of_main.const_data_ptr());
  p.dloss = dloss.const_data_ptr();
  KernelTensors tensors = packed.named();
  packed_main.add_to(tensors);
  tensors.read.insert(tensors.read.end(), {{"grad_loss", dloss}, {"index_lse", of_index}, {"mass", of_main}});
  run_backward(p, in, result, tensors, run);
  return result;
}

}  // namespace flash_attn_ext::indexer
