#include "arguments.h"

#include <ATen/ops/empty_like.h>

namespace flash_attn_ext::torch_overrides {
namespace {

bool is_dense_strided(const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested(); }

bool is_attention_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Dimensions of size 1 may have any stride.
bool has_strides_of(const at::Tensor& t, const at::Tensor& model) {
  for (int64_t dim = 0; dim < t.dim(); ++dim)
    if (t.size(dim) > 1 && t.stride(dim) != model.stride(dim)) return false;
  return true;
}

}  // namespace

const char* why_not_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  for (const at::Tensor* t : {&query, &key, &value}) {
    if (!t->defined() || !is_dense_strided(*t)) return "a tensor is nested or sparse";
    if (t->device() != query.device()) return "the tensors are on several devices";
    if (t->scalar_type() != query.scalar_type()) return "the tensors have several dtypes";
    if (t->dim() < 3) return "a tensor has fewer than 3 dimensions";
    if (t->dim() != query.dim()) return "the tensors' numbers of dimensions differ";
    if (t->size(-1) < 1) return "the head dimension is 0";
    if (t->size(-1) > kMaxHeadDim) return "the head dimension is above 1024";
  }
  if (!is_attention_dtype(query.scalar_type()))
    return "the dtype is not float32, float64, bfloat16 or float16";
  if (key.size(-1) != query.size(-1)) return "the head dimensions of query and key differ";
  if (value.size(-2) != key.size(-2)) return "the lengths of key and value differ";
  const int64_t batch_dims = query.dim() - 3;
  const auto batch = query.sizes().slice(0, batch_dims);
  if (key.sizes().slice(0, batch_dims) != batch || value.sizes().slice(0, batch_dims) != batch)
    return "the batches of query, key and value differ";
  const int64_t heads = query.size(-3), heads_kv = key.size(-3);
  if (value.size(-3) != heads_kv) return "the heads of key and value differ";
  if (heads_kv == 0 ? heads != 0 : heads % heads_kv != 0)
    return "the query heads are no multiple of the key heads";
  return nullptr;
}

const char* why_not_mask(const OptionalTensor& mask, const at::Tensor& query) {
  if (!mask) return nullptr;
  if (!is_dense_strided(*mask)) return "attn_mask is nested or sparse";
  if (mask->device() != query.device()) return "attn_mask is on another device";
  const auto dtype = mask->scalar_type();
  if (dtype != at::kBool && dtype != at::kFloat && dtype != query.scalar_type())
    return "attn_mask is neither bool nor float32 nor of the query's dtype";
  return nullptr;
}

OptionalTensor mask_as_4d(const OptionalTensor& mask) {
  if (!mask || mask->dim() >= 4) return mask;
  std::vector<int64_t> sizes(4 - mask->dim(), 1);
  sizes.insert(sizes.end(), mask->sizes().begin(), mask->sizes().end());
  return mask->reshape(sizes);
}

at::Tensor in_memory_order_of(const at::Tensor& t, const at::Tensor& model) {
  const at::Tensor result = at::empty_like(model);
  return has_strides_of(t, result) ? t : result.copy_(t);
}

at::Tensor sequence_before_heads(const at::Tensor& t) {
  return t.transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace flash_attn_ext::torch_overrides
