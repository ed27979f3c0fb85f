#include "varlen.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "../dense/pack_params.h"

namespace flash_attn_ext {
namespace {

// Dense views of packed tensors.
//   (T, H, D)                    (B, H, T, D)   dense_view()
//   lse (H, T)                   (1, H, T)
//   mask (H, T_q, max_seqlen_k)  (1, H, T_q, max_seqlen_k)
class DenseViews {
 public:
  explicit DenseViews(const at::Tensor& cu_seqlens_q) : sequences_(cu_seqlens_q.size(0) - 1) {}

  // `dense` is the shape of the tensor's row in dense/attention.h.
  at::Tensor of(const Shape& dense, const at::Tensor& t) const {
    if (!t.defined()) return t;
    if (dense.kind == Shape::kBroadcast && t.dim() == 3) return t.unsqueeze(0);
    if (dense.kind != Shape::kExact) return t;
    if (dense.count == 3) return t.unsqueeze(0);
    return dense_view(t, sequences_);
  }
  OptionalTensor of(const Shape& dense, const OptionalTensor& t) const {
    return t ? OptionalTensor(of(dense, *t)) : t;
  }

#define FA_VIEW(name, type, shape, ...) views.name = of(shape, packed.name);
  AttentionTensors of(const VarlenTensors& packed) const {
    AttentionTensors views;
    FA_DIFFERENTIABLE(FA_VIEW)
    FA_RNG_STATE_ROW(FA_VIEW)
    return views;
  }
  AttentionBackwardTensors of(const VarlenBackwardTensors& packed) const {
    AttentionBackwardTensors views;
    views.set_forward(of(packed.forward()));
    FA_COTANGENTS(FA_VIEW)
    FA_RESULTS(FA_VIEW)
    return views;
  }
  AttentionJvpTensors of(const VarlenJvpTensors& packed) const {
    AttentionJvpTensors views;
    views.set_forward(of(packed.forward()));
    FA_TANGENTS(FA_VIEW)
    return views;
  }
  AttentionDoubleBackwardTensors of(const VarlenDoubleBackwardTensors& packed) const {
    AttentionDoubleBackwardTensors views;
    views.set_backward(of(packed.backward()));
    FA_TANGENTS(FA_VIEW)
    FA_RESULT_TANGENTS(FA_VIEW)
    return views;
  }
  Gradients of(const Gradients& packed) const {
    Gradients views;
    FA_DIFFERENTIABLE(FA_VIEW)
    return views;
  }
#undef FA_VIEW

 private:
  int64_t sequences_;
};

// Adds the sequences to the params of the dense views.
template <class Tensors>
void set_sequences(AttentionParams& p, const Tensors& in, const VarlenOptions& o) {
  VarlenParams& varlen = p.varlen;
  varlen.cu_seqlens_q = pack_offsets(in.cu_seqlens_q);
  varlen.cu_seqlens_k = pack_offsets(in.cu_seqlens_k);
  varlen.seqused_q = pack_offsets(in.seqused_q);
  varlen.seqused_k = pack_offsets(in.seqused_k);
  varlen.total_q = p.sizes.seqlen_q;
  varlen.total_k = p.sizes.seqlen_k;
  varlen.lower_right = o.lower_right;
  varlen.mask_by_row = in.attn_mask && in.attn_mask->dim() == 3;
  p.band.diagonal = pack_diagonal(o.attention());  // the kernels add each sequence's own lower-right shift
  if (o.max_seqlen_q) p.sizes.seqlen_q = std::min(p.sizes.seqlen_q, o.max_seqlen_q->expect_int());
  if (o.max_seqlen_k) p.sizes.seqlen_k = std::min(p.sizes.seqlen_k, o.max_seqlen_k->expect_int());
}

AttentionBackwardOptions attention_options(const VarlenBackwardOptions& options) {
  AttentionBackwardOptions backward;
  backward.set_forward(options.forward().attention());
  backward.grad_mask = options.grad_mask;
  return backward;
}

AttentionResult empty_packed_result(const at::Tensor& query, const at::Tensor& value, bool fill) {
  const c10::SymInt rows = query.sym_size(0), heads = query.sym_size(1), d_v = value.sym_size(2);
  const auto lse_options = query.options().dtype(accumulate_type(query));
  if (!fill)
    return {at::empty_symint({rows, heads, d_v}, query.options()),
            at::empty_symint({heads, rows}, lse_options)};
  return {at::zeros_symint({rows, heads, d_v}, query.options()),
          at::full_symint({heads, rows}, -std::numeric_limits<double>::infinity(), lse_options)};
}

// Kernels do not write rows beyond seqused_q and seqused_k: then the gradients start as zeros.
template <class Tensors>
Gradients empty_packed_gradients(const Tensors& in, const GradMask& wanted) {
  const bool fill = in.seqused_q || in.seqused_k;
  Gradients gradients;
  auto allocate = [&](at::Tensor& gradient, const auto& optional) {
    const at::Tensor& t = *tensor_or_null(optional);
    gradient =
        fill ? at::zeros_symint(t.sym_sizes(), t.options()) : at::empty_symint(t.sym_sizes(), t.options());
  };
#define FA_ALLOCATE(name, ...) \
  if (wanted.name) allocate(gradients.name, in.name);
  FA_DIFFERENTIABLE(FA_ALLOCATE)
#undef FA_ALLOCATE
  return gradients;
}

}  // namespace

AttentionResult AttentionVarlen::empty(const Tensors& in, const Options&) {
  return empty_packed_result(in.query, in.value, in.seqused_q.has_value());
}

AttentionJvpResult AttentionVarlenJvp::empty(const Tensors& in, const Options&) {
  const bool fill = in.seqused_q.has_value();
  auto [out, lse] = empty_packed_result(in.query, in.value, fill);
  auto [tangent_out, tangent_lse] = empty_packed_result(in.query, in.value, fill);
  if (fill) tangent_lse.zero_();
  return {out, lse, tangent_out, tangent_lse};
}

Gradients AttentionVarlenBackward::empty(const Tensors& in, const Options& options) {
  return empty_packed_gradients(in, GradMask(options.grad_mask));
}

Gradients AttentionVarlenDoubleBackward::empty(const Tensors& in, const Options& options) {
  return empty_packed_gradients(in, GradMask(options.grad_mask));
}

Packed<AttentionVarlen> AttentionVarlen::pack(const Tensors& given, const Options& options,
                                              const Result& result) {
  Packed<AttentionVarlen> packed{to_kernel_layout(given), {}, {}};
  const DenseViews views(given.cu_seqlens_q);
  packed.params = pack_attention(views.of(packed.tensors), views.of(kOutShape, result.out), result.lse,
                                 options.attention());
  set_sequences(packed.params, packed.tensors, options);
  return packed;
}

Packed<AttentionVarlenBackward> AttentionVarlenBackward::pack(const Tensors& given, const Options& options,
                                                              const Result& result) {
  Packed<AttentionVarlenBackward> packed{to_kernel_layout(given), {}, {}};
  fill_grad_out(packed.tensors);
  const DenseViews views(given.cu_seqlens_q);
  packed.per_head = empty_per_head(result, given.lse, given.cu_seqlens_q.size(0) - 1, given.query.size(1));
  pack_backward(packed.params, views.of(packed.tensors), attention_options(options), views.of(result),
                packed.per_head);
  set_sequences(packed.params, packed.tensors, options.forward());
  return packed;
}

Packed<AttentionVarlenJvp> AttentionVarlenJvp::pack(const Tensors& given, const Options& options,
                                                    const Result& result) {
  Packed<AttentionVarlenJvp> packed{to_kernel_layout(given), {}, {}};
  const DenseViews views(given.cu_seqlens_q);
  AttentionJvpResult dense_result = result;
  dense_result.out = views.of(kOutShape, result.out);
  dense_result.tangent_out = views.of(kOutShape, result.tangent_out);
  pack_jvp(packed.params, views.of(packed.tensors), options.attention(), dense_result);
  set_sequences(packed.params, packed.tensors, options);
  return packed;
}

Packed<AttentionVarlenDoubleBackward> AttentionVarlenDoubleBackward::pack(const Tensors& given,
                                                                          const Options& options,
                                                                          const Result& result) {
  Packed<AttentionVarlenDoubleBackward> packed{to_kernel_layout(given), {}, {}};
  fill_grad_out(packed.tensors);
  fill_tangents(packed.tensors);
  const DenseViews views(given.cu_seqlens_q);
  packed.per_head = empty_per_head(result, given.lse, given.cu_seqlens_q.size(0) - 1, given.query.size(1));
  pack_double_backward(packed.params, views.of(packed.tensors), attention_options(options), views.of(result),
                       packed.per_head);
  set_sequences(packed.params, packed.tensors, options.forward());
  return packed;
}

}  // namespace flash_attn_ext
