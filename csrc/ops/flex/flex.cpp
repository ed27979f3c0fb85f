#include "flex.h"

#include "../check_tensors.h"
#include "../checks.h"
#include "../outputs.h"
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

}  // namespace

void check_flex(const FlexTensors& tensors, const FlexOptions& options) {
  check_sizes(check_tensors(tensors));
  check_options(tensors.attention(), options.attention());
  check_functions(tensors, options);
}

void check_flex_backward(const FlexBackwardTensors& tensors, const FlexBackwardOptions& options) {
  check_sizes(check_tensors(tensors));
  check_options(tensors.forward().attention(), options.forward().attention());
  check_grad_mask(tensors, options.grad_mask);
  check_functions(tensors.forward(), options.forward());
  TORCH_CHECK_VALUE(!options.grad_captured || tensors.captured,
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

FlexGradients empty_flex_gradients(const FlexBackwardTensors& tensors, const FlexBackwardOptions& options) {
  FlexGradients gradients;
  gradients.set_attention(empty_gradients(tensors.attention().forward(), GradMask(options.grad_mask)));
  if (options.grad_captured)
    gradients.captured = at::empty_symint(tensors.captured->sym_sizes(), tensors.captured->options());
  return gradients;
}

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

}  // namespace flash_attn_ext
