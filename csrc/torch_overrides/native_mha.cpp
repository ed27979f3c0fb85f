// _native_multi_head_attention: the operator of torch's fused inference path, for nn.MultiheadAttention and,
// through _transformer_encoder_layer_fwd, for nn.TransformerEncoderLayer. It runs below autograd.
#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/_nested_view_from_buffer.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "arguments.h"
#include "overrides.h"

namespace flash_attn_ext::torch_overrides {
namespace {

// The arguments, in the order of torch's schema.
struct Layer {
  const at::Tensor &query, &key, &value;
  int64_t embed_dim, heads;
  const at::Tensor &qkv_weight, &qkv_bias, &out_weight, &out_bias;
  OptionalTensor mask;
  bool need_weights;
  std::optional<int64_t> mask_type;

  explicit Layer(Arguments a)
      : query(a[0].toTensor()),
        key(a[1].toTensor()),
        value(a[2].toTensor()),
        embed_dim(a[3].toInt()),
        heads(a[4].toInt()),
        qkv_weight(a[5].toTensor()),
        qkv_bias(a[6].toTensor()),
        out_weight(a[7].toTensor()),
        out_bias(a[8].toTensor()),
        mask(tensor_or_none(a[9])),
        need_weights(a[10].toBool()),
        mask_type(a[12].toOptional<int64_t>()) {}
};

const char* why_not_layer(const Layer& layer) {
  if (layer.need_weights) return "the attention weights are asked for (need_weights)";
  if (!layer.query.is_same(layer.key) || !layer.key.is_same(layer.value))
    return "query, key and value are not one tensor";
  if (layer.heads < 1 || layer.embed_dim % layer.heads != 0) return "embed_dim is no multiple of the heads";
  if (layer.embed_dim / layer.heads > kMaxHeadDim) return "the head dimension is above 1024";
  const auto dtype = layer.query.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kBFloat16 && dtype != at::kHalf)
    return "the dtype is not float32, float64, bfloat16 or float16";
  for (const at::Tensor* t : {&layer.qkv_weight, &layer.qkv_bias, &layer.out_weight, &layer.out_bias})
    if (!t->defined() || t->layout() != at::kStrided || t->scalar_type() != dtype)
      return "a weight has another dtype or layout";
  return nullptr;
}

// Computes out (..., S, embed_dim), before the output projection, from (..., S, 3 * embed_dim).
at::Tensor attend(const at::Tensor& qkv, int64_t heads, const OptionalTensor& mask) {
  const at::Tensor parts = qkv.unflatten(-1, {3, heads, -1});  // (B, S, 3, H, D)
  auto part = [&](int64_t n) { return parts.select(2, n).transpose(1, 2); };
  auto [out, lse] = call<Attention>({part(0), part(1), part(2), mask}, AttentionOptions{});
  return out.transpose(1, 2).flatten(2);
}

}  // namespace

const char* try_native_mha(Arguments arguments, Results& results) {
  const Layer layer(arguments);
  if (const char* reason = why_not_layer(layer)) return reason;
  if (layer.query.layout() != at::kStrided || layer.query.dim() != 3)
    return "query does not have 3 dimensions";
  const int64_t batch = layer.query.size(0), length = layer.query.size(1);
  OptionalTensor mask = layer.mask;
  if (mask) {
    // A bool mask of torch hides where it is True; a float mask is added. (S, S) is type 0, (B, S) 1, (B, H, S, S) 2.
    const int64_t type = layer.mask_type.value_or(-1);
    if (type == 1 && mask->dim() == 2 && mask->size(0) == batch && mask->size(1) == length)
      mask = mask->view({batch, 1, 1, length});
    else if (type == 0 && mask->dim() == 2 && mask->size(0) == length && mask->size(1) == length)
      mask = mask->view({1, 1, length, length});
    else if (type != 2 || mask->dim() != 4 || mask->size(0) != batch || mask->size(2) != length ||
             mask->size(3) != length || (mask->size(1) != 1 && mask->size(1) != layer.heads))
      return "the mask does not have the shape of its type";
    if (mask->scalar_type() == at::kBool)
      mask = mask->logical_not();
    else if (const char* reason = why_not_mask(mask, layer.query))
      return reason;
  }
  const at::Tensor qkv = at::linear(layer.query, layer.qkv_weight, layer.qkv_bias);
  results = {at::linear(attend(qkv, layer.heads, mask), layer.out_weight, layer.out_bias), at::Tensor()};
  return nullptr;
}

const char* try_native_mha_nested(Arguments arguments, Results& results) {
  const Layer layer(arguments);
  if (const char* reason = why_not_layer(layer)) return reason;
  if (layer.mask) return "a nested query with a mask";
  const auto* query = at::native::get_nested_tensor_impl_or_null(layer.query);
  if (!query || query->dim() != 3 || !at::native::nested_tensor_impl_is_contiguous(query))
    return "the nested query is not contiguous with 3 dimensions";
  const at::Tensor sizes = query->get_nested_sizes();  // (B, 2): length and features of each sequence
  const at::Tensor rows = query->get_unsafe_storage_as_tensor().view({-1, layer.embed_dim});
  const at::Tensor qkv = at::linear(rows, layer.qkv_weight, layer.qkv_bias);
  const at::Tensor out = at::empty({rows.size(0), layer.embed_dim}, rows.options());
  const auto length = sizes.accessor<int64_t, 2>();
  for (int64_t b = 0, start = 0; b < sizes.size(0); start += length[b][0], ++b) {
    if (length[b][0] == 0) continue;
    const at::Tensor sequence = qkv.narrow(0, start, length[b][0]).unsqueeze(0);
    out.narrow(0, start, length[b][0]).copy_(attend(sequence, layer.heads, OptionalTensor()).squeeze(0));
  }
  const at::Tensor projected = at::linear(out, layer.out_weight, layer.out_bias);
  results = {at::_nested_view_from_buffer(projected.view(-1), sizes, query->get_nested_strides(),
                                          query->get_storage_offsets()),
             at::Tensor()};
  return nullptr;
}

}  // namespace flash_attn_ext::torch_overrides
