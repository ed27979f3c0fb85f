#include "pack_params.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "outputs.h"

namespace flash_attn_ext {
namespace {

// A dimension of size 1 is broadcast: its stride must not move.
int64_t broadcast_stride(const at::Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

Band pack_band(const Sizes& z, const AttentionOptions& o) {
  auto bounded = [](const std::optional<int64_t>& window) {
    return window ? std::clamp(*window, -Band::kUnbounded, Band::kUnbounded) : Band::kUnbounded;
  };
  Band band;
  band.diagonal = pack_diagonal(o) + (o.lower_right ? z.seqlen_k - z.seqlen_q : 0);
  band.left = bounded(o.window_left);
  band.right = o.causal ? std::min<int64_t>(0, bounded(o.window_right)) : bounded(o.window_right);
  return band;
}

Tensor4 pack_tensor4(const at::Tensor& t) {  // an undefined tensor gives a null Tensor4
  if (!t.defined()) return {};
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

MaskGrad pack_mask_grad(const at::Tensor& dmask) {
  if (!dmask.defined()) return {};
  return {dmask.mutable_data_ptr(), dmask.size(0), dmask.size(1), dmask.size(2), dmask.size(3)};
}

MaskParams pack_mask(const OptionalTensor& mask) {
  if (!mask) return {};
  return {mask->const_data_ptr(),     pack_dtype(mask->scalar_type()), broadcast_stride(*mask, 0),
          broadcast_stride(*mask, 1), broadcast_stride(*mask, 2),      broadcast_stride(*mask, 3)};
}

MaskParams pack_masks(const OptionalTensor& mask, const OptionalTensor& key_mask) {
  if (!key_mask) return pack_mask(mask);
  if (!mask) return pack_mask(key_mask->unsqueeze(1).unsqueeze(1));
  MaskParams both = pack_mask(mask);
  both.key_data = key_mask->const_data_ptr();
  both.key_dtype = pack_dtype(key_mask->scalar_type());
  both.key_stride_b = key_mask->stride(0);
  both.key_stride_k = key_mask->stride(1);
  return both;
}

// AlibiParams or SinkParams of a tensor (H) or (B, H).
template <class Params>
Params pack_per_head(const OptionalTensor& t) {
  if (!t) return {};
  return {t->const_data_ptr(), t->dim() == 2 ? t->stride(0) : 0, t->stride(-1)};
}

// One for each head: kernels write these, and store_per_head_gradients() sums them up.
at::Tensor empty_per_head(const at::Tensor& gradient, const AttentionBackwardTensors& given, int64_t batch) {
  if (!gradient.defined()) return {};
  return at::empty({batch, given.query.size(1)}, given.lse.options());
}

void* data_or_null(const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

InputTangents to_kernel_layout(const InputTangents& given, const at::Tensor& query) {
  InputTangents tangents = given;
  for (OptionalTensor* t : {&tangents.query, &tangents.key, &tangents.value})
    if (*t) *t = with_contiguous_rows(**t);
  for (OptionalTensor* per_head : {&tangents.alibi_slopes, &tangents.sink})
    if (*per_head) *per_head = (*per_head)->to(accumulate_type(query));
  return tangents;
}

Tangents pack_tangents(const InputTangents& t) {
  const auto tensor4 = [](const OptionalTensor& x) { return x ? pack_tensor4(*x) : Tensor4{}; };
  return {tensor4(t.query),
          tensor4(t.key),
          tensor4(t.value),
          pack_mask(t.attn_mask),
          pack_per_head<AlibiParams>(t.alibi_slopes),
          pack_per_head<SinkParams>(t.sink)};
}

at::Tensor zeros_like_one_row(const at::Tensor& t) {
  return at::zeros({1, 1, 1, t.size(3)}, t.options()).expand_as(t);
}

}  // namespace

at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

DType pack_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kBool: return DType::kBool;
    default: TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

AttentionTensors to_kernel_layout(const AttentionTensors& given) {
  AttentionTensors tensors = given;
  tensors.query = with_contiguous_rows(given.query);
  tensors.key = with_contiguous_rows(given.key);
  tensors.value = with_contiguous_rows(given.value);
  for (OptionalTensor* per_head : {&tensors.alibi_slopes, &tensors.sink})
    if (*per_head) *per_head = (*per_head)->to(accumulate_type(given.query));
  return tensors;
}

int64_t pack_diagonal(const AttentionOptions& o) {
  return std::clamp(o.diagonal, -Band::kUnbounded, Band::kUnbounded);
}

DropoutParams pack_dropout(const at::Tensor& rng_state, double dropout_p) {
  DropoutParams dropout;
  dropout.rng_state = rng_state.const_data_ptr<int64_t>();
  dropout.place = rng_state.size(0) > 2 ? dropout.rng_state + 2 : nullptr;
  dropout.threshold = static_cast<uint64_t>(std::llround(std::ldexp(dropout_p, 32)));
  dropout.keep_scale = dropout_p < 1 ? 1.0 / (1.0 - dropout_p) : 0.0;
  return dropout;
}

AttentionParams pack_attention(const AttentionTensors& in, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& o) {
  AttentionParams p;
  p.dtype = pack_dtype(in.query.scalar_type());
  p.sizes = {in.query.size(0), in.query.size(1), in.key.size(1),  in.query.size(2),
             in.key.size(2),   in.query.size(3), in.value.size(3)};
  p.q = pack_tensor4(in.query);
  p.k = pack_tensor4(in.key);
  p.v = pack_tensor4(in.value);
  p.out = pack_tensor4(out);
  p.lse = const_cast<void*>(lse.const_data_ptr());
  p.scale = o.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.sizes.head_dim)));
  p.softcap = o.softcap;
  p.band = pack_band(p.sizes, o);
  p.mask = pack_masks(in.attn_mask, in.key_mask);
  p.alibi = pack_per_head<AlibiParams>(in.alibi_slopes);
  p.sink = pack_per_head<SinkParams>(in.sink);
  if (o.dropout_p > 0) p.dropout = pack_dropout(*in.rng_state, o.dropout_p);
  p.decode = {o.num_splits, o.unified_max.has_value(), o.unified_max.value_or(0.0)};
  return p;
}

PackedBackward pack_backward(const AttentionBackwardTensors& given, const AttentionBackwardOptions& options,
                             const Gradients& result, int64_t batch) {
  PackedBackward packed;
  packed.tensors = to_kernel_layout(given.forward());
  packed.out = with_contiguous_rows(given.out);
  packed.lse = given.lse.contiguous();
  packed.dout = given.grad_out ? with_contiguous_rows(*given.grad_out) : zeros_like_one_row(given.out);
  if (given.grad_lse) packed.dlse = given.grad_lse->contiguous();
  packed.dslopes_per_head = empty_per_head(result.alibi_slopes, given, batch);
  packed.dsink_per_head = empty_per_head(result.sink, given, batch);

  BackwardParams& p = packed.params;
  static_cast<AttentionParams&>(p) =
      pack_attention(packed.tensors, packed.out, packed.lse, options.forward());
  p.dout = pack_tensor4(packed.dout);
  p.dlse = packed.dlse.defined() ? packed.dlse.const_data_ptr() : nullptr;
  p.dq = pack_tensor4(result.query);
  p.dk = pack_tensor4(result.key);
  p.dv = pack_tensor4(result.value);
  p.dmask = pack_mask_grad(result.attn_mask);
  p.deterministic = options.deterministic;
  p.dalibi_slopes = data_or_null(packed.dslopes_per_head);
  p.dsink = data_or_null(packed.dsink_per_head);
  return packed;
}

void store_per_head_gradients(const PackedBackward& packed, const Gradients& result) {
  auto store = [](const at::Tensor& per_head, const at::Tensor& gradient) {
    if (gradient.defined()) gradient.copy_(gradient.dim() == 1 ? per_head.sum(0) : per_head);
  };
  store(packed.dslopes_per_head, result.alibi_slopes);
  store(packed.dsink_per_head, result.sink);
}

PackedJvp pack_jvp(const AttentionJvpTensors& given, const AttentionOptions& options,
                   const AttentionJvpResult& result) {
  PackedJvp packed;
  packed.tensors = to_kernel_layout(given.forward());
  packed.tangents = to_kernel_layout(given.tangents(), given.query);
  static_cast<AttentionParams&>(packed.params) =
      pack_attention(packed.tensors, result.out, result.lse, options);
  packed.params.tangents = pack_tangents(packed.tangents);
  packed.params.t_out = pack_tensor4(result.tangent_out);
  packed.params.t_lse = result.tangent_lse.mutable_data_ptr();
  return packed;
}

PackedDoubleBackward pack_double_backward(const AttentionDoubleBackwardTensors& given,
                                          const AttentionBackwardOptions& options, const Gradients& result,
                                          int64_t batch) {
  PackedDoubleBackward packed;
  packed.backward = pack_backward(given.backward(), options, result, batch);
  packed.tangents = to_kernel_layout(given.tangents(), given.query);
  if (!packed.tangents.query) packed.tangents.query = zeros_like_one_row(given.query);
  if (!packed.tangents.key) packed.tangents.key = zeros_like_one_row(given.key);
  if (!packed.tangents.value) packed.tangents.value = zeros_like_one_row(given.value);
  packed.tangent_out = with_contiguous_rows(given.tangent_out);
  packed.tangent_lse = given.tangent_lse.contiguous();

  DoubleBackwardParams& p = packed.params;
  static_cast<BackwardParams&>(p) = packed.backward.params;
  p.tangents = pack_tangents(packed.tangents);
  p.t_out = pack_tensor4(packed.tangent_out);
  p.t_lse = packed.tangent_lse.const_data_ptr();
  return packed;
}

}  // namespace flash_attn_ext
