#include "varlen.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace flash_attn_ext {
namespace {

// (T, H, D) as the batch of one that it is in memory: (1, H, T, D).
at::Tensor as_4d(const at::Tensor& t) { return t.defined() ? t.transpose(0, 1).unsqueeze(0) : t; }
OptionalTensor as_4d(const OptionalTensor& t) { return t ? OptionalTensor(as_4d(*t)) : t; }

// A mask by rows, (H, T_q, max_seqlen_k), as (1, H, T_q, max_seqlen_k).
at::Tensor mask_as_4d(const at::Tensor& t) { return t.defined() && t.dim() == 3 ? t.unsqueeze(0) : t; }
OptionalTensor mask_as_4d(const OptionalTensor& t) { return t ? OptionalTensor(mask_as_4d(*t)) : t; }

AttentionTensors as_batch_of_one(const VarlenTensors& in) {
  return {as_4d(in.query), as_4d(in.key), as_4d(in.value), mask_as_4d(in.attn_mask),
          in.alibi_slopes, in.sink,       in.rng_state};
}

// Makes the params of a batch of one those of its sequences.
void cut_into_sequences(AttentionParams& p, const VarlenTensors& in, const VarlenOptions& o) {
  VarlenParams& varlen = p.varlen;
  varlen.cu_seqlens_q = pack_offsets(in.cu_seqlens_q);
  varlen.cu_seqlens_k = pack_offsets(in.cu_seqlens_k);
  varlen.seqused_q = pack_offsets(in.seqused_q);
  varlen.seqused_k = pack_offsets(in.seqused_k);
  varlen.total_q = p.sizes.seqlen_q;
  varlen.total_k = p.sizes.seqlen_k;
  varlen.lower_right = o.lower_right;
  varlen.mask_by_row = in.attn_mask && in.attn_mask->dim() == 3;
  p.band.diagonal = pack_diagonal(o.attention());
  p.sizes.batch = in.cu_seqlens_q.size(0) - 1;
  if (o.max_seqlen_q) p.sizes.seqlen_q = std::min(p.sizes.seqlen_q, o.max_seqlen_q->expect_int());
  if (o.max_seqlen_k) p.sizes.seqlen_k = std::min(p.sizes.seqlen_k, o.max_seqlen_k->expect_int());
  for (Tensor4* t : {&p.q, &p.k, &p.v, &p.out}) t->stride_b = 0;
}

}  // namespace

VarlenTensors to_kernel_layout(const VarlenTensors& given) {
  VarlenTensors tensors = given;
  for (at::Tensor* t : {&tensors.query, &tensors.key, &tensors.value}) *t = with_contiguous_rows(*t);
  for (at::Tensor* t : {&tensors.cu_seqlens_q, &tensors.cu_seqlens_k}) *t = t->contiguous();
  for (OptionalTensor* t : {&tensors.seqused_q, &tensors.seqused_k})
    if (*t) *t = (*t)->contiguous();
  for (OptionalTensor* t : {&tensors.alibi_slopes, &tensors.sink})
    if (*t) *t = (*t)->to(accumulate_type(given.query));
  return tensors;
}

AttentionResult empty_varlen_result(const VarlenTensors& in) {
  const c10::SymInt rows = in.query.sym_size(0), heads = in.query.sym_size(1), d_v = in.value.sym_size(2);
  const auto lse_options = in.query.options().dtype(accumulate_type(in.query));
  if (!in.seqused_q)
    return {at::empty_symint({rows, heads, d_v}, in.query.options()),
            at::empty_symint({heads, rows}, lse_options)};
  return {at::zeros_symint({rows, heads, d_v}, in.query.options()),
          at::full_symint({heads, rows}, -std::numeric_limits<double>::infinity(), lse_options)};
}

AttentionJvpResult empty_varlen_jvp_result(const VarlenTensors& in) {
  auto [out, lse] = empty_varlen_result(in);
  auto [tangent_out, tangent_lse] = empty_varlen_result(in);
  if (in.seqused_q) tangent_lse.zero_();
  return {out, lse, tangent_out, tangent_lse};
}

Gradients empty_varlen_gradients(const VarlenTensors& in, const GradMask& wanted) {
  const bool fill = in.seqused_q || in.seqused_k;
  Gradients grads;
  auto allocate = [&](at::Tensor& grad, bool want, const auto& optional) {
    if (!want) return;
    const at::Tensor& t = *tensor_or_null(optional);
    grad = fill ? at::zeros_symint(t.sym_sizes(), t.options()) : at::empty_symint(t.sym_sizes(), t.options());
  };
#define FA_ALLOCATE(name, ...) allocate(grads.name, wanted.name, in.name);
  FA_ATTENTION_DIFFERENTIABLE(FA_ALLOCATE)
#undef FA_ALLOCATE
  return grads;
}

PackedVarlen pack_varlen(const VarlenTensors& given, const VarlenOptions& options,
                         const AttentionResult& result) {
  PackedVarlen packed;
  packed.tensors = to_kernel_layout(given);
  packed.params =
      pack_attention(as_batch_of_one(packed.tensors), as_4d(result.out), result.lse, options.attention());
  cut_into_sequences(packed.params, packed.tensors, options);
  return packed;
}

namespace {

Gradients as_4d(const Gradients& g) {
  return {as_4d(g.query), as_4d(g.key), as_4d(g.value), mask_as_4d(g.attn_mask), g.alibi_slopes, g.sink};
}

InputTangents as_4d(const InputTangents& t) {
  return {as_4d(t.query), as_4d(t.key), as_4d(t.value), mask_as_4d(t.attn_mask), t.alibi_slopes, t.sink};
}

AttentionBackwardTensors backward_as_4d(const VarlenBackwardTensors& given, const VarlenTensors& laid_out) {
  AttentionBackwardTensors tensors;
  tensors.set_forward(as_batch_of_one(laid_out));
  tensors.out = as_4d(given.out);
  tensors.lse = given.lse.unsqueeze(0);
  tensors.grad_out = as_4d(given.grad_out);
  if (given.grad_lse) tensors.grad_lse = given.grad_lse->unsqueeze(0);
  return tensors;
}

AttentionBackwardOptions of_one_batch(const VarlenBackwardOptions& options) {
  AttentionBackwardOptions backward;
  backward.set_forward(options.forward().attention());
  backward.grad_mask = options.grad_mask;
  return backward;
}

void clear_batch_strides(std::initializer_list<Tensor4*> tensors) {
  for (Tensor4* t : tensors) t->stride_b = 0;
}

}  // namespace

PackedVarlenBackward pack_varlen_backward(const VarlenBackwardTensors& given,
                                          const VarlenBackwardOptions& options, const Gradients& result) {
  PackedVarlenBackward all;
  all.tensors = to_kernel_layout(given.forward());
  all.packed = pack_backward(backward_as_4d(given, all.tensors), of_one_batch(options), as_4d(result),
                             given.cu_seqlens_q.size(0) - 1);
  BackwardParams& p = all.packed.params;
  cut_into_sequences(p, all.tensors, options.forward());
  clear_batch_strides({&p.dout, &p.dq, &p.dk, &p.dv});
  return all;
}

PackedVarlenJvp pack_varlen_jvp(const VarlenJvpTensors& given, const VarlenOptions& options,
                                const AttentionJvpResult& result) {
  PackedVarlenJvp all;
  all.tensors = to_kernel_layout(given.forward());
  AttentionJvpTensors tensors;
  tensors.set_forward(as_batch_of_one(all.tensors));
  tensors.set_tangents(as_4d(given.tangents()));
  all.packed = pack_jvp(tensors, options.attention(),
                        {as_4d(result.out), result.lse, as_4d(result.tangent_out), result.tangent_lse});
  JvpParams& p = all.packed.params;
  cut_into_sequences(p, all.tensors, options);
  clear_batch_strides({&p.tangents.q, &p.tangents.k, &p.tangents.v, &p.t_out});
  return all;
}

PackedVarlenDoubleBackward pack_varlen_double_backward(const VarlenDoubleBackwardTensors& given,
                                                       const VarlenBackwardOptions& options,
                                                       const Gradients& result) {
  PackedVarlenDoubleBackward all;
  all.tensors = to_kernel_layout(given.forward());
  AttentionDoubleBackwardTensors tensors;
  const AttentionBackwardTensors backward = backward_as_4d(given.backward(), all.tensors);
  tensors.set_forward(backward.forward());
  tensors.set_tangents(as_4d(given.tangents()));
  tensors.grad_out = backward.grad_out;
  tensors.grad_lse = backward.grad_lse;
  tensors.out = backward.out;
  tensors.lse = backward.lse;
  tensors.tangent_out = as_4d(given.tangent_out);
  tensors.tangent_lse = given.tangent_lse.unsqueeze(0);
  all.packed =
      pack_double_backward(tensors, of_one_batch(options), as_4d(result), given.cu_seqlens_q.size(0) - 1);
  DoubleBackwardParams& p = all.packed.params;
  cut_into_sequences(p, all.tensors, options.forward());
  clear_batch_strides({&p.dout, &p.dq, &p.dk, &p.dv, &p.tangents.q, &p.tangents.k, &p.tangents.v, &p.t_out});
  return all;
}

}  // namespace flash_attn_ext
