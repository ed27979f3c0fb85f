#include "weights.h"

#include <ATen/ops/empty.h>

#include "check_tensors.h"
#include "checks.h"

namespace flash_attn_ext {
namespace {

// (B, S_q, S_k), the same for all heads.
Tensor4 pack_weights_tensor(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), 0, t.stride(1)};
}

void check_scores(DimSizes sizes, const WeightsTensors& tensors, const WeightsOptions& options) {
  sizes[Dim::kHeadDimV] = sizes[Dim::kHeadDim];  // there is no value whose size to check
  check_sizes(sizes);
  check_options(tensors.attention(), options.attention());
}

}  // namespace

AttentionTensors WeightsTensors::attention() const {
  AttentionTensors tensors;
#define FA_COPY(name, ...) tensors.name = name;
  FA_WEIGHTS_DIFFERENTIABLE(FA_COPY)
  FA_WITHOUT_GRADIENT(FA_COPY)
#undef FA_COPY
  tensors.value = key.narrow(3, 0, 0);
  return tensors;
}

void check_weights(const WeightsTensors& tensors, const WeightsOptions& options) {
  check_scores(check_tensors(tensors), tensors, options);
}

void check_weights_backward(const WeightsBackwardTensors& tensors, const WeightsBackwardOptions& options) {
  check_scores(check_tensors(tensors), tensors.forward(), options.forward());
  check_grad_mask(tensors, options.grad_mask);
  TORCH_CHECK_VALUE(!GradMask(options.grad_mask).value,
                    "grad_mask: got a request for value's gradient; allowed: none, as there is no value");
}

at::Tensor empty_weights(const WeightsTensors& tensors) {
  const at::Tensor& query = tensors.query;
  return at::empty_symint({query.sym_size(0), query.sym_size(2), tensors.key.sym_size(2)}, query.options());
}

PackedWeights pack_weights(const WeightsTensors& given, const WeightsOptions& options,
                           const at::Tensor& weights) {
  PackedWeights packed;
  packed.tensors = to_kernel_layout(given.attention());
  packed.lse = given.lse.contiguous();
  static_cast<AttentionParams&>(packed.params) =
      pack_attention(packed.tensors, packed.tensors.value, packed.lse, options.attention());
  packed.params.weights = pack_weights_tensor(weights);
  return packed;
}

PackedBackward pack_weights_backward(const WeightsBackwardTensors& given,
                                     const WeightsBackwardOptions& options, const Gradients& result) {
  AttentionBackwardTensors tensors;
  tensors.set_forward(given.forward().attention());
  tensors.out = given.query.narrow(3, 0, 0);
  tensors.lse = given.lse;
  AttentionBackwardOptions backward_options;
  backward_options.set_forward(options.forward().attention());
  PackedBackward packed = pack_backward(tensors, backward_options, result, given.query.size(0));
  packed.dout = with_contiguous_rows(given.grad_weights);
  packed.params.dweights = pack_weights_tensor(packed.dout);
  return packed;
}

}  // namespace flash_attn_ext
