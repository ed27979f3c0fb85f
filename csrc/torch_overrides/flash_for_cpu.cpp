// _scaled_dot_product_flash_attention_for_cpu and its backward, below autograd. Compiled graphs, torch.func and
// torch.jit call these operators. Both return the results of torch's kernels, in the same memory order. So the forward
// of a call may run before activate() or deactivate(), and its backward after it.
#include <ATen/ops/isneginf.h>

#include <cmath>

#include "arguments.h"
#include "overrides.h"

namespace flash_attn_ext::torch_overrides {
namespace {

struct Call {
  AttentionTensors tensors;
  AttentionOptions options;
};

const char* read_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      double dropout_p, bool is_causal, const OptionalTensor& mask,
                      std::optional<double> scale, Call& call) {
  if (const char* reason = why_not_tensors(query, key, value)) return reason;
  if (const char* reason = why_not_mask(mask, query)) return reason;
  if (query.dim() != 4) return "the tensors do not have 4 dimensions";
  if (value.size(3) != query.size(3)) return "the head dimensions of query and value differ";
  if (dropout_p > 0) return "dropout";
  if (scale && !std::isfinite(*scale)) return "scale is not finite";
  if (mask && mask->dim() > 4) return "attn_mask has more dimensions than query";
  call.tensors.query = query;
  call.tensors.key = key;
  call.tensors.value = value;
  call.tensors.attn_mask = mask_as_4d(mask);
  if (call.tensors.attn_mask) {
    const int64_t full[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
    for (int64_t dim = 0; dim < 4; ++dim) {
      const int64_t size = call.tensors.attn_mask->size(dim);
      if (size != 1 && size != full[dim]) return "attn_mask does not broadcast to the scores";
    }
  }
  call.options.scale = scale;
  call.options.causal = is_causal;
  return nullptr;
}

}  // namespace

const char* try_flash_for_cpu(Arguments arguments, Results& results) {
  const at::Tensor& query = arguments[0].toTensor();
  Call call;
  if (const char* reason = read_call(query, arguments[1].toTensor(), arguments[2].toTensor(),
                                     arguments[3].toDouble(), arguments[4].toBool(),
                                     tensor_or_none(arguments[5]), arguments[6].toOptional<double>(), call))
    return reason;
  auto [out, lse] = flash_attn_ext::call<Attention>(call.tensors, call.options);
  // torch's lse of a row without keys is 0, and its backward needs 0. Our backward accepts 0 and -inf.
  if (call.tensors.attn_mask) lse.masked_fill_(at::isneginf(lse), 0);
  results = {in_memory_order_of(out, query), sequence_before_heads(lse)};
  return nullptr;
}

const char* try_flash_for_cpu_backward(Arguments arguments, Results& results) {
  const at::Tensor &grad_out = arguments[0].toTensor(), &out = arguments[4].toTensor(),
                   &lse = arguments[5].toTensor();
  Call call;
  if (const char* reason = read_call(arguments[1].toTensor(), arguments[2].toTensor(),
                                     arguments[3].toTensor(), arguments[6].toDouble(), arguments[7].toBool(),
                                     tensor_or_none(arguments[8]), arguments[9].toOptional<double>(), call))
    return reason;
  AttentionBackwardTensors tensors;
  tensors.set_forward(call.tensors);
  tensors.out = out;
  tensors.lse = lse;
  tensors.grad_out = grad_out;
  AttentionBackwardOptions options;
  options.set_forward(call.options);
  options.grad_mask = flags_of_query_key_value();
  const Gradients gradients = flash_attn_ext::call<AttentionBackward>(tensors, options);
  results = {sequence_before_heads(gradients.query), sequence_before_heads(gradients.key),
             sequence_before_heads(gradients.value)};
  return nullptr;
}

}  // namespace flash_attn_ext::torch_overrides
