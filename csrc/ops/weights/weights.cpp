#include "weights.h"

#include <ATen/ops/empty.h>

#include "../dense/pack_params.h"

namespace flash_attn_ext {
namespace {

// (B, S_q, S_k) with head stride 0: the average over the heads.
Tensor4 pack_weights_tensor(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), 0, t.stride(1)};
}

}  // namespace

AttentionTensors WeightsTensors::attention() const {
  AttentionTensors tensors;
#define FA_COPY(name, ...) tensors.name = name;
  FA_WEIGHTS_INPUTS(FA_COPY)
#undef FA_COPY
  tensors.value = key.narrow(3, 0, 0);
  return tensors;
}

AttentionOptions WeightsOptions::attention() const {
  AttentionOptions options;
#define FA_COPY(name, ...) options.name = name;
  FA_SCORE_OPTIONS(FA_COPY)
#undef FA_COPY
  return options;
}

WeightsResult AttentionWeights::empty(const Tensors& in, const Options&) {
  return {
      at::empty_symint({in.query.sym_size(0), in.query.sym_size(2), in.key.sym_size(2)}, in.query.options())};
}

Gradients AttentionWeightsBackward::empty(const Tensors& in, const Options& options) {
  AttentionBackwardTensors tensors;
  tensors.set_forward(in.forward().attention());
  AttentionBackwardOptions backward_options;
  backward_options.grad_mask = options.grad_mask;
  return AttentionBackward::empty(tensors, backward_options);
}

Packed<AttentionWeights> AttentionWeights::pack(const Tensors& given, const Options& options,
                                                const Result& result) {
  Packed<AttentionWeights> packed{to_kernel_layout(given), {}, {}};
  const AttentionTensors tensors = packed.tensors.attention();
  static_cast<AttentionParams&>(packed.params) =
      pack_attention(tensors, tensors.value, packed.tensors.lse, options.attention());
  packed.params.weights = pack_weights_tensor(result.weights);
  return packed;
}

Packed<AttentionWeightsBackward> AttentionWeightsBackward::pack(const Tensors& given, const Options& options,
                                                                const Result& result) {
  Packed<AttentionWeightsBackward> packed{to_kernel_layout(given), {}, {}};
  AttentionBackwardTensors tensors;
  tensors.set_forward(packed.tensors.forward().attention());
  tensors.out = packed.tensors.query.narrow(3, 0, 0);
  tensors.grad_out = tensors.out;  // no columns: dweights stands for the gradient
  tensors.lse = packed.tensors.lse;
  AttentionBackwardOptions backward_options;
  backward_options.set_forward(options.forward().attention());
  packed.per_head = empty_per_head(result, given.lse, given.query.size(0), given.query.size(1));
  pack_backward(packed.params, tensors, backward_options, result, packed.per_head);
  packed.params.dweights = pack_weights_tensor(packed.tensors.grad_weights);
  return packed;
}

}  // namespace flash_attn_ext
