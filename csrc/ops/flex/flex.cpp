#include "flex.h"

#include <ATen/ops/empty.h>

#include "../checks/check_tensors.h"
#include "../dense/pack_params.h"
#include "check_program.h"

namespace flash_attn_ext {
namespace {

constexpr int64_t kPrograms = 4;  // score, gradient, captured gradient, mask

void check_row(const char* name, const OptionalTensor& t, at::ScalarType dtype) {
  if (!t) return;
  TORCH_CHECK_TYPE(t->scalar_type() == dtype, name, ": got dtype ", name_of(t->scalar_type()),
                   "; allowed: ", name_of(dtype));
  TORCH_CHECK_VALUE(t->dim() == 1 && t->is_contiguous(), name, ": got a tensor of shape ", t->sym_sizes(),
                    "; allowed: one contiguous dimension");
}

void check_block_states(const FlexTensors& in, const FlexOptions& options) {
  if (!in.block_states) return;
  const at::Tensor& t = *in.block_states;
  TORCH_CHECK_TYPE(t.scalar_type() == at::kByte, "block_states: got dtype ", name_of(t.scalar_type()),
                   "; allowed: uint8");
  const c10::SymInt rows = (in.query.sym_size(2) + options.block_size_q - 1) / options.block_size_q,
                    cols = (in.key.sym_size(2) + options.block_size_k - 1) / options.block_size_k;
  TORCH_CHECK_VALUE(t.dim() == 4 && t.is_contiguous() &&
                        (t.sym_size(0) == 1 || t.sym_size(0) == in.query.sym_size(0)) &&
                        (t.sym_size(1) == 1 || t.sym_size(1) == in.query.sym_size(1)) &&
                        t.sym_size(2) == rows && t.sym_size(3) == cols,
                    "block_mask: got blocks of shape ", t.sym_sizes(),
                    "; allowed: (batch or 1, heads or 1, query blocks, key blocks) = [", in.query.sym_size(0),
                    ", ", in.query.sym_size(1), ", ", rows, ", ", cols, "]");
}

void check_functions(const FlexTensors& in, const FlexOptions& options) {
  const bool is_double = in.query.scalar_type() == at::kDouble;
  check_row("captured", in.captured, accumulate_type(in.query));
  check_row("captured_ints", in.captured_ints, is_double ? at::kLong : at::kInt);
  check_row("programs", in.programs, at::kLong);
  check_block_states(in, options);
  TORCH_CHECK_VALUE(options.block_size_q >= 1 && options.block_size_k >= 1, "block_mask: got blocks of ",
                    options.block_size_q, " x ", options.block_size_k, "; allowed: 1 or more");
  TORCH_CHECK_VALUE(
      options.num_splits <= 1 && !options.unified_max,
      "num_splits, unified_max: got one with score_mod, mask_mod or block_mask; allowed: neither");
}

// Packs the programs and the numbers that they read. Throws ValueError if a program would read beyond them.
UserFunctions pack_functions(const FlexTensors& tensors, const FlexOptions& options) {
  UserFunctions functions;
  if (tensors.captured) {
    functions.captured = tensors.captured->const_data_ptr();
    functions.captured_count = tensors.captured->numel();
  }
  const int64_t ints = tensors.captured_ints ? tensors.captured_ints->numel() : 0;
  if (ints > 0) functions.captured_ints = tensors.captured_ints->const_data_ptr();
  if (tensors.programs) {
    const int64_t* words = tensors.programs->const_data_ptr<int64_t>();
    const int64_t count = tensors.programs->numel();
    TORCH_CHECK_VALUE(count >= kPrograms, "programs: got ", count, " words; allowed: at least ", kPrograms);
    Program* const programs[kPrograms] = {&functions.score, &functions.gradient, &functions.captured_gradient,
                                          &functions.mask};
    const ProgramUse uses[kPrograms] = {ProgramUse::kScore, ProgramUse::kGradient,
                                        ProgramUse::kCapturedGradient, ProgramUse::kMask};
    for (int64_t n = 0; n < kPrograms; ++n) {
      if (words[n] < 0) continue;
      TORCH_CHECK_VALUE(words[n] <= count, "programs: got a program at word ", words[n], " of ", count);
      *programs[n] =
          check_program(words + words[n], count - words[n], uses[n], functions.captured_count, ints);
    }
  }
  if (tensors.block_states) {
    const at::Tensor& t = *tensors.block_states;
    functions.blocks = {t.const_data_ptr<uint8_t>(),
                        t.size(0) == 1 ? 0 : t.stride(0),
                        t.size(1) == 1 ? 0 : t.stride(1),
                        t.size(2),
                        t.size(3),
                        options.block_size_q,
                        options.block_size_k};
  }
  return functions;
}

}  // namespace

void FlexOptions::check() const { attention().check(); }
void FlexBackwardOptions::check() const { forward().check(); }

void AttentionFlex::check(const Tensors& in, const Options& options) {
  check_rows(in, options, [](DimSizes&) {});
  check_rng_state(in.rng_state, options.dropout_p);
  check_functions(in, options);
}

void AttentionFlexBackward::check(const Tensors& in, const Options& options) {
  check_rows(in, options, [](DimSizes&) {});
  check_rng_state(in.rng_state, options.dropout_p);
  check_grad_mask(differentiable_of(in), options.grad_mask);
  check_functions(in.forward(), options.forward());
  TORCH_CHECK_VALUE(!options.grad_captured || in.captured,
                    "grad_captured: got True; allowed only with captured");
}

AttentionBackwardTensors FlexBackwardTensors::attention() const {
  AttentionBackwardTensors tensors;
  tensors.set_forward(forward().attention());
  tensors.grad_out = grad_out;
  tensors.grad_lse = grad_lse;
  tensors.out = out;
  tensors.lse = lse;
  return tensors;
}

AttentionResult AttentionFlex::empty(const Tensors& in, const Options& options) {
  return Attention::empty(in.attention(), options.attention());
}

FlexGradients AttentionFlexBackward::empty(const Tensors& in, const Options& options) {
  FlexGradients gradients;
  gradients.set_attention(AttentionBackward::empty(in.attention(), options.attention()));
  if (options.grad_captured)
    gradients.captured = at::empty_symint(in.captured->sym_sizes(), in.captured->options());
  return gradients;
}

Packed<AttentionFlex> AttentionFlex::pack(const Tensors& given, const Options& options,
                                          const Result& result) {
  Packed<AttentionFlex> packed;
  packed.tensors = to_kernel_layout(given);
  packed.functions = std::make_unique<UserFunctions>(pack_functions(packed.tensors, options));
  packed.params = pack_attention(packed.tensors.attention(), result.out, result.lse, options.attention());
  packed.params.functions = packed.functions.get();
  return packed;
}

Packed<AttentionFlexBackward> AttentionFlexBackward::pack(const Tensors& given, const Options& options,
                                                          const Result& result) {
  Packed<AttentionFlexBackward> packed;
  packed.tensors = to_kernel_layout(given);
  fill_grad_out(packed.tensors);
  packed.functions =
      std::make_unique<UserFunctions>(pack_functions(packed.tensors.forward(), options.forward()));
  if (result.captured.defined()) {
    if (packed.functions->captured_gradient)
      packed.functions->dcaptured = result.captured.mutable_data_ptr();
    else
      result.captured.zero_();  // no instruction reads `captured` with a derivative
  }
  const Gradients gradients = result.attention();
  packed.per_head = empty_per_head(gradients, given.lse, given.query.size(0), given.query.size(1));
  pack_backward(packed.params, packed.tensors.attention(), options.attention(), gradients, packed.per_head);
  packed.params.functions = packed.functions.get();
  return packed;
}

}  // namespace flash_attn_ext
