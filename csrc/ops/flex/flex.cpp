#include "flex.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <iterator>

#include "../../core/sequence.h"
#include "../checks/check_tensors.h"
#include "../checks/checks.h"
#include "../dense/pack_params.h"
#include "check_program.h"

namespace flash_attn_ext {
namespace {

constexpr int64_t kPrograms = 4;  // score, gradient, captured gradient, mask

void check_row(const char* name, const OptionalTensor& t, at::ScalarType dtype, at::Device device) {
  if (!t) return;
  TORCH_CHECK_VALUE(t->device() == device, name, ": got a tensor on ", t->device(), "; allowed: ", device);
  TORCH_CHECK_TYPE(t->scalar_type() == dtype, name, ": got dtype ", name_of(t->scalar_type()),
                   "; allowed: ", name_of(dtype));
  TORCH_CHECK_VALUE(t->dim() == 1 && t->is_contiguous(), name, ": got a tensor of shape ", t->sym_sizes(),
                    "; allowed: one contiguous dimension");
}

// The sizes of block_states. Packed sequences have one state for all blocks up to the longest length: the blocks of
// packed calls are checked in check_blocks_cover().
struct BlockSizes {
  c10::SymInt batch, heads;
  std::optional<c10::SymInt> seqlen_q, seqlen_k;
};
template <class Tensors>
BlockSizes block_sizes(const Tensors& in) {
  if constexpr (std::is_same_v<Tensors, FlexTensors>)
    return {in.query.sym_size(0), in.query.sym_size(1), in.query.sym_size(2), in.key.sym_size(2)};
  else
    return {in.cu_seqlens_q.sym_size(0) - 1, in.query.sym_size(1), std::nullopt, std::nullopt};
}

// The rows of block_states before the row of query 0.
template <class Tensors>
constexpr int64_t kRowsBefore = std::is_same_v<Tensors, CacheFlexTensors> ? 1 : 0;

template <class Tensors>
void check_functions(const Tensors& in, const FunctionOptions& options) {
  const auto integer = in.query.scalar_type() == at::kDouble ? at::kLong : at::kInt;
  check_row("captured", in.captured, accumulate_type(in.query), in.query.device());
  check_row("captured_ints", in.captured_ints, integer, in.query.device());
  // Programs are in the host's memory, for every device. Programs on the Meta device need a query there: with any
  // other query the kernel of the Meta key would return memory without values.
  const bool is_meta = in.programs && in.programs->is_meta() && in.query.is_meta();
  check_row("programs", in.programs, at::kLong, is_meta ? at::kMeta : at::kCPU);
  options.check();
  if (!in.block_states) return;

  const at::Tensor& t = *in.block_states;
  TORCH_CHECK_TYPE(t.scalar_type() == at::kByte, "block_states: got dtype ", name_of(t.scalar_type()),
                   "; allowed: uint8");
  TORCH_CHECK_VALUE(t.device() == in.query.device(), "block_mask: got a mask on ", t.device(),
                    "; allowed: query's device, ", in.query.device());
  const BlockSizes sizes = block_sizes(in);
  const auto fits = [](const std::optional<c10::SymInt>& length, int64_t block, const c10::SymInt& count) {
    return length ? count == (*length + block - 1) / block : count >= 1;
  };
  const c10::SymInt rows = t.dim() == 4 ? t.sym_size(2) - kRowsBefore<Tensors> : c10::SymInt(0);
  TORCH_CHECK_VALUE(t.dim() == 4 && t.is_contiguous() &&
                        (t.sym_size(0) == 1 || t.sym_size(0) == sizes.batch) &&
                        (t.sym_size(1) == 1 || t.sym_size(1) == sizes.heads) &&
                        fits(sizes.seqlen_q, options.block_size_q, rows) &&
                        fits(sizes.seqlen_k, options.block_size_k, t.sym_size(3)),
                    "block_mask: got blocks of shape ", t.sym_sizes(),
                    "; allowed: (batch or 1, heads or 1, query blocks, key blocks), with batch ", sizes.batch,
                    " and heads ", sizes.heads);
}

// Packs the programs and the numbers that they read. Throws ValueError if a program would read beyond them.
// `rows_before`: kRowsBefore of the call.
UserFunctions pack_functions(const FunctionTensors& tensors, const FunctionOptions& options,
                             int64_t rows_before) {
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
                        options.block_size_k,
                        rows_before * options.block_size_q};
  }
  return functions;
}

// Throws ValueError if a packed sequence is longer than its block mask.
void check_blocks_cover(const AttentionParams& call, const BlockStates& blocks) {
  if (!blocks || !call.varlen) return;
  const int64_t rows = blocks.rows - blocks.queries_before / blocks.block_q;
  const auto covers = [](int64_t count, int64_t block, int64_t length) {
    return length <= 0 || (length - 1) / block < count;
  };
  for (int64_t b = 0; b < call.sizes.batch; ++b) {
    const AttentionParams p = of_sequence<AttentionParams>(call, b);
    const int64_t queries = first_query_index(p) + p.sizes.seqlen_q, keys = p.sizes.seqlen_k;
    TORCH_CHECK_VALUE(covers(rows, blocks.block_q, queries) && covers(blocks.cols, blocks.block_k, keys),
                      "block_mask: got ", rows, " x ", blocks.cols, " blocks of ", blocks.block_q, " x ",
                      blocks.block_k, "; allowed: at least the ", queries, " queries and ", keys,
                      " keys of sequence ", b);
  }
}

template <class Op>
Packed<Op> pack_with_functions(const typename Op::Tensors& given, const typename Op::Options& options,
                               const typename Op::Base::Result& result) {
  Packed<Op> packed;
  static_cast<Packed<typename Op::Base>&>(packed) = Op::Base::pack(given.base(), options.base(), result);
  packed.function_tensors = given.functions();
  packed.functions = std::make_unique<UserFunctions>(
      pack_functions(packed.function_tensors, options.functions(), kRowsBefore<typename Op::Tensors>));
  packed.params.functions = packed.functions.get();
  // On a GPU nothing reads the lengths on the host. Its kernels extend the last blocks.
  if (given.query.is_cpu()) check_blocks_cover(packed.params, packed.functions->blocks);
  return packed;
}

template <class Op>
Packed<Op> pack_backward_with_functions(const typename Op::Tensors& given,
                                        const typename Op::Options& options, const FlexGradients& result) {
  Packed<Op> packed = pack_with_functions<Op>(given, options, result.base());
  if (!result.captured.defined()) return packed;
  if (packed.functions->captured_gradient)
    packed.functions->dcaptured = result.captured.mutable_data_ptr();
  else
    result.captured.zero_();  // no instruction reads `captured` with a derivative
  return packed;
}

template <class Op>
void check_with_functions(const typename Op::Tensors& in, const typename Op::Options& options) {
  Op::Base::check(in.base(), options.base());
  check_functions(in, options.functions());
}

template <class Op>
void check_derivative(const typename Op::Tensors& in, const typename Op::Options& options) {
  Op::Base::check(in.base(), options.base());
  check_functions(in.forward(), options.functions());
}

template <class Op>
void check_gradient(const typename Op::Tensors& in, const typename Op::Options& options) {
  check_derivative<Op>(in, options);
  TORCH_CHECK_VALUE(!options.grad_mask.back() || in.captured,
                    "grad_mask: got a request for captured's gradient; allowed only with captured");
}

// Gives a new tensor the memory order of `like`, as torch's flex_attention does. The operators without functions keep the
// batch outermost.
void set_stride_order(at::Tensor& result, const at::Tensor& like) {
  const bool has_order = like.sym_stride(0) >= like.sym_stride(1) && like.sym_stride(0) >= like.sym_stride(2);
  if (!result.defined() || has_order) return;
  int order[] = {2, 1,
                 0};  // the fastest first, and of equal strides the last; the last dimension is contiguous
  std::stable_sort(std::begin(order), std::end(order),
                   [&](int m, int n) { return like.sym_stride(m) < like.sym_stride(n); });
  c10::SymDimVector strides(4, 1);
  c10::SymInt step = result.sym_size(3);
  for (const int dim : order) {
    strides[dim] = step;
    step = step * result.sym_size(dim);
  }
  result = at::empty_strided_symint(result.sym_sizes(), strides, result.options());
}

template <class Op>
typename Op::Result empty_result(const typename Op::Tensors& in, const typename Op::Options& options) {
  typename Op::Result result = Op::Base::empty(in.base(), options.base());
  if constexpr (std::is_same_v<typename Op::Base, Attention>) set_stride_order(result.out, in.query);
  return result;
}

template <class Op>
FlexGradients empty_gradients(const typename Op::Tensors& in, const typename Op::Options& options) {
  FlexGradients gradients;
  gradients.set_base(Op::Base::empty(in.base(), options.base()));
  if constexpr (std::is_same_v<typename Op::Base, AttentionBackward>) {
    set_stride_order(gradients.query, in.query);
    set_stride_order(gradients.key, in.key);
    set_stride_order(gradients.value, in.value);
  }
  if (options.grad_mask.back())
    gradients.captured = at::empty_symint(in.captured->sym_sizes(), in.captured->options());
  return gradients;
}

}  // namespace

#define FA_CHECK_OPTION(name, type, default_value, check, allowed)          \
  {                                                                         \
    const auto& v = name;                                                   \
    TORCH_CHECK_VALUE(check, #name ": got ", name, "; allowed: ", allowed); \
  }
void FunctionOptions::check() const { FA_FUNCTION_OPTIONS(FA_CHECK_OPTION) }
#undef FA_CHECK_OPTION
void FlexOptions::check() const { base().check(); }
void FlexBackwardOptions::check() const { forward().check(); }
void VarlenFlexOptions::check() const { base().check(); }
void VarlenFlexBackwardOptions::check() const { forward().check(); }
void CacheFlexOptions::check() const { base().check(); }

#define FA_FORWARD_STEPS(Op)                                                                                \
  void Op::check(const Tensors& in, const Options& options) { check_with_functions<Op>(in, options); }      \
  Op::Result Op::empty(const Tensors& in, const Options& options) { return empty_result<Op>(in, options); } \
  Packed<Op> Op::pack(const Tensors& given, const Options& options, const Result& result) {                 \
    return pack_with_functions<Op>(given, options, result);                                                 \
  }
#define FA_BACKWARD_STEPS(Op)                                                                    \
  void Op::check(const Tensors& in, const Options& options) { check_gradient<Op>(in, options); } \
  Op::Result Op::empty(const Tensors& in, const Options& options) {                              \
    return empty_gradients<Op>(in, options);                                                     \
  }                                                                                              \
  Packed<Op> Op::pack(const Tensors& given, const Options& options, const Result& result) {      \
    return pack_backward_with_functions<Op>(given, options, result);                             \
  }
// Without pack(): the kernels are written in Python.
#define FA_JVP_STEPS(Op)                                                                           \
  void Op::check(const Tensors& in, const Options& options) { check_derivative<Op>(in, options); } \
  Op::Result Op::empty(const Tensors& in, const Options& options) {                                \
    return Base::empty(in.base(), options.base());                                                 \
  }
#define FA_DOUBLE_BACKWARD_STEPS(Op)                                                             \
  void Op::check(const Tensors& in, const Options& options) { check_gradient<Op>(in, options); } \
  Op::Result Op::empty(const Tensors& in, const Options& options) { return empty_gradients<Op>(in, options); }

FA_FORWARD_STEPS(AttentionFlex)
FA_BACKWARD_STEPS(AttentionFlexBackward)
FA_JVP_STEPS(AttentionFlexJvp)
FA_DOUBLE_BACKWARD_STEPS(AttentionFlexDoubleBackward)
FA_FORWARD_STEPS(AttentionVarlenFlex)
FA_BACKWARD_STEPS(AttentionVarlenFlexBackward)
FA_JVP_STEPS(AttentionVarlenFlexJvp)
FA_DOUBLE_BACKWARD_STEPS(AttentionVarlenFlexDoubleBackward)
FA_FORWARD_STEPS(AttentionCacheFlex)

}  // namespace flash_attn_ext
