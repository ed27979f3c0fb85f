#include "plan.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "../core/mask.h"
#include "checks.h"
#include "outputs.h"
#include "pack_params.h"

namespace flash_attn_ext {
namespace {

// Stand-ins have the sizes, strides and address of a tensor on any device, and nobody reads their elements:
// params are packed from them as from the tensors themselves.
at::Tensor stand_in(const void* address, const at::Tensor& form) {
  return at::from_blob(const_cast<void*>(address), form.sizes(), form.strides(),
                       at::TensorOptions(form.scalar_type()));
}

// For memory that is still to be allocated: aligned as allocators do it.
at::Tensor stand_in_for_new(const at::Tensor& form) {
  return form.defined() ? stand_in(reinterpret_cast<void*>(uintptr_t{1} << 20), form) : at::Tensor();
}

// Sizes and strides without memory.
at::Tensor form_of(const at::Tensor& t, at::ScalarType dtype) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).dtype(dtype));
}
at::Tensor form_of(const at::Tensor& t) { return form_of(t, t.scalar_type()); }

int64_t bytes_of(const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; }

struct StandIns {
  AttentionInputs forms;   // the inputs as they are
  AttentionInputs inputs;  // what make_readable() makes of them
  int64_t copied_bytes = 0;
};

StandIns stand_ins_for(const AttentionInputs& in) {
  StandIns result;
  result.forms = {form_of(in.query), form_of(in.key), form_of(in.value),
                  in.attn_mask,      in.alibi_slopes, in.rng_state};
  for (OptionalTensor* t : {&result.forms.attn_mask, &result.forms.alibi_slopes, &result.forms.rng_state})
    if (*t) *t = form_of(**t);
  const AttentionInputs readable = make_readable(result.forms);
  auto replace = [&](const at::Tensor& given, const at::Tensor& form, const at::Tensor& readable_form) {
    if (readable_form.is_same(form)) return stand_in(given.const_data_ptr(), form);
    result.copied_bytes += bytes_of(readable_form);
    return stand_in_for_new(readable_form);
  };
  auto replace_optional = [&](const OptionalTensor& given, const OptionalTensor& form,
                              const OptionalTensor& readable_form) {
    return given ? OptionalTensor(replace(*given, *form, *readable_form)) : std::nullopt;
  };
  result.inputs = {replace(in.query, result.forms.query, readable.query),
                   replace(in.key, result.forms.key, readable.key),
                   replace(in.value, result.forms.value, readable.value),
                   replace_optional(in.attn_mask, result.forms.attn_mask, readable.attn_mask),
                   replace_optional(in.alibi_slopes, result.forms.alibi_slopes, readable.alibi_slopes),
                   replace_optional(in.rng_state, result.forms.rng_state, readable.rng_state)};
  return result;
}

void check_has_kernels(at::Device device) {
  if (device.is_cuda()) return check_has_cuda_half();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu(), "flash_attn: no kernel for device ", device,
                              "; allowed: cpu, cuda");
}

template <class Params>
KernelChoice choose(const Params& params, at::Device device) {
  return device.is_cuda() ? choose_on_cuda(params, device) : choose_on_cpu(params);
}

Plan plan_of(const AttentionParams& params, KernelChoice choice) {
  Plan plan;
  plan.choice = std::move(choice);
  plan.sizes = params.sizes;
  plan.band = params.band;
  return plan;
}

}  // namespace

int64_t Plan::visible_tiles(int64_t block_q, int64_t block_k) const {
  int64_t tiles = 0;
  for (int64_t i = 0; i < sizes.seqlen_q; i += block_q) {
    const Range seen = visible_keys(band, i, std::min(i + block_q, sizes.seqlen_q), sizes.seqlen_k);
    if (seen.begin < seen.end) tiles += (seen.end - 1) / block_k - seen.begin / block_k + 1;
  }
  return tiles;
}

Plan plan_attention(FA_INPUT_ARGS, FA_OPTION_ARGS) {
  const AttentionInputs given = FA_INPUTS;
  const AttentionOptions options = FA_OPTIONS;
  check_attention(given, options);
  check_has_kernels(query.device());
  const StandIns stand_ins = stand_ins_for(given);
  const auto [out, lse] = empty_forward_result(stand_ins.forms);
  const AttentionParams params =
      pack_attention(stand_ins.inputs, stand_in_for_new(out), stand_in_for_new(lse), options);
  Plan plan = plan_of(params, choose(params, query.device()));
  plan.deterministic = options.deterministic;
  plan.bytes = {{"out", bytes_of(out)},
                {"lse", bytes_of(lse)},
                {"workspace", plan.choice.workspace_bytes},
                {"copies", stand_ins.copied_bytes}};
  return plan;
}

Plan plan_attention_backward(FA_INPUT_ARGS, FA_OPTION_ARGS, GradMask::Flags grad_mask) {
  const AttentionInputs given = FA_INPUTS;
  const AttentionOptions options = FA_OPTIONS;
  check_attention(given, options);
  check_has_kernels(query.device());
  const StandIns stand_ins = stand_ins_for(given);
  const auto [out, lse] = empty_forward_result(stand_ins.forms);
  const BackwardResult grads = empty_backward_result(stand_ins.forms, GradMask::from(grad_mask));
  const auto& [dq, dk, dv, dmask, dslopes] = grads;
  const BackwardResult new_grads{stand_in_for_new(dq), stand_in_for_new(dk), stand_in_for_new(dv),
                                 stand_in_for_new(dmask), stand_in_for_new(dslopes)};
  const at::Tensor new_out = stand_in_for_new(out);
  const PackedBackward packed = pack_backward(new_out, std::nullopt, stand_ins.inputs, new_out,
                                              stand_in_for_new(lse), options, new_grads);
  Plan plan = plan_of(packed.params, choose(packed.params, query.device()));
  plan.deterministic = packed.params.deterministic;
  // Per batch and head, and, where the slopes are the same for all batches, once more per head.
  int64_t slopes_bytes = bytes_of(packed.dslopes_per_head);
  if (slopes_bytes > 0 && alibi_slopes->dim() == 1) slopes_bytes += slopes_bytes / query.size(0);
  plan.bytes = {{"dq", bytes_of(dq)},
                {"dk", bytes_of(dk)},
                {"dv", bytes_of(dv)},
                {"dmask", bytes_of(dmask)},
                {"dslopes", bytes_of(dslopes)},
                {"workspace", plan.choice.workspace_bytes + slopes_bytes},
                {"copies", stand_ins.copied_bytes}};
  return plan;
}

}  // namespace flash_attn_ext
