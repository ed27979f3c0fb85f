#include "pack_params.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "outputs.h"

namespace flash_attn_ext {
namespace {

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

// A dimension of size 1 is broadcast: its stride must not move.
int64_t broadcast_stride(const at::Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

Band pack_band(const Sizes& z, const AttentionOptions& o) {
  auto bounded = [](const std::optional<int64_t>& window) {
    return window ? std::clamp(*window, -Band::kUnbounded, Band::kUnbounded) : Band::kUnbounded;
  };
  Band band;
  band.diagonal = o.lower_right ? z.seqlen_k - z.seqlen_q : 0;
  band.left = bounded(o.window_left);
  band.right = o.causal ? std::min<int64_t>(0, bounded(o.window_right)) : bounded(o.window_right);
  return band;
}

at::Tensor readable(const at::Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous(); }

Tensor4 pack_tensor4(const at::Tensor& t) {  // an undefined tensor gives a null Tensor4
  if (!t.defined()) return {};
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

MaskGrad pack_mask_grad(const at::Tensor& dmask) {
  if (!dmask.defined()) return {};
  return {dmask.mutable_data_ptr(), dmask.size(0), dmask.size(1), dmask.size(2), dmask.size(3)};
}

}  // namespace

AttentionTensors readable(const AttentionTensors& given) {
  AttentionTensors tensors = given;
  tensors.query = readable(given.query);
  tensors.key = readable(given.key);
  tensors.value = readable(given.value);
  if (given.alibi_slopes) tensors.alibi_slopes = given.alibi_slopes->to(accumulate_type(given.query));
  return tensors;
}

uint64_t dropout_threshold(double dropout_p) {
  return static_cast<uint64_t>(std::llround(std::ldexp(dropout_p, 32)));
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
  if (in.attn_mask) {
    const at::Tensor& mask = *in.attn_mask;
    p.mask = {mask.const_data_ptr(),     pack_dtype(mask.scalar_type()), broadcast_stride(mask, 0),
              broadcast_stride(mask, 1), broadcast_stride(mask, 2),      broadcast_stride(mask, 3)};
  }
  if (in.alibi_slopes) {
    const at::Tensor& slopes = *in.alibi_slopes;
    p.alibi = {slopes.const_data_ptr(), slopes.dim() == 2 ? slopes.stride(0) : 0, slopes.stride(-1)};
  }
  if (o.dropout_p > 0) {
    p.dropout.rng_state = in.rng_state->const_data_ptr<int64_t>();
    p.dropout.threshold = dropout_threshold(o.dropout_p);
    p.dropout.keep_scale = o.dropout_p < 1 ? 1.0 / (1.0 - o.dropout_p) : 0.0;
  }
  p.decode = {o.num_splits, o.unified_max.has_value(), o.unified_max.value_or(0.0)};
  return p;
}

PackedBackward pack_backward(const AttentionBackwardTensors& given, const AttentionBackwardOptions& options,
                             const Gradients& result) {
  PackedBackward packed;
  packed.tensors = readable(given.forward());
  packed.out = readable(given.out);
  packed.lse = given.lse.contiguous();
  packed.dout = given.grad_out
                    ? readable(*given.grad_out)
                    : at::zeros({1, 1, 1, given.out.size(3)}, given.out.options()).expand_as(given.out);
  if (given.grad_lse) packed.dlse = given.grad_lse->contiguous();
  if (result.alibi_slopes.defined())
    packed.dslopes_per_head = at::empty({given.query.size(0), given.query.size(1)}, given.lse.options());

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
  p.dalibi_slopes = packed.dslopes_per_head.defined() ? packed.dslopes_per_head.mutable_data_ptr() : nullptr;
  return packed;
}

void store_slopes_gradient(const PackedBackward& packed, const Gradients& result) {
  const at::Tensor& dslopes = result.alibi_slopes;
  if (dslopes.defined())
    dslopes.copy_(dslopes.dim() == 1 ? packed.dslopes_per_head.sum(0) : packed.dslopes_per_head);
}

}  // namespace flash_attn_ext
