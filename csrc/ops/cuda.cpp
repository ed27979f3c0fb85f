// CUDA key: check, allocate, pack, let the selector choose a tier, launch on the current stream.
//
// Nothing here waits for the GPU, and memory comes from torch's allocator, so that a call can be captured in
// a CUDA graph. Compiled and, by tests/cuda_host, its kernels tested on the host; not yet run on hardware.
#include <torch/library.h>

#include "checks.h"
#include "kvcache.h"
#include "outputs.h"
#include "pack_params.h"
#include "plan.h"
#include "weights.h"

#if defined(FLASH_ATTN_EXT_WITH_CUDA)
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/select.h"
#endif

namespace flash_attn_ext {
namespace {

#if defined(FLASH_ATTN_EXT_WITH_CUDA)

template <class Params>
std::string refusal_of(const cuda::Selection<Params>& selection) {
  return "flash_attn on CUDA: " + selection.reason;
}

// The allocator keeps the workspace for this stream: it may be handed out again as soon as we return, to work
// that comes after ours.
template <class Params>
void run(const cuda::Selection<Params>& selection, const Params& params, const at::TensorOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(selection.launch, refusal_of(selection));
  const at::Tensor workspace =
      at::empty({static_cast<int64_t>(selection.workspace_bytes)}, options.dtype(at::kByte));
  C10_CUDA_CHECK(selection.launch(params, workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
}

AttentionResult attention_cuda(const AttentionTensors& given, const AttentionOptions& options) {
  check_storages(given);
  check_attention(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  AttentionResult result = empty_result(given);
  const AttentionTensors tensors = to_kernel_layout(given);
  const AttentionParams params = pack_attention(tensors, result.out, result.lse, options);
  run(cuda::select_forward(params), params, given.query.options());
  return result;
}

Gradients attention_backward_cuda(const AttentionBackwardTensors& given,
                                  const AttentionBackwardOptions& options) {
  check_storages(given);
  check_attention_backward(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const Gradients result = empty_gradients(given.forward(), GradMask(options.grad_mask));
  const PackedBackward packed = pack_backward(given, options, result, given.query.size(0));
  run(cuda::select_backward(packed.params), packed.params, given.query.options());
  store_per_head_gradients(packed, result);
  return result;
}

AttentionJvpResult attention_jvp_cuda(const AttentionJvpTensors& given, const AttentionOptions& options) {
  check_storages(given);
  check_attention_jvp(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const AttentionJvpResult result = empty_jvp_result(given.forward());
  const PackedJvp packed = pack_jvp(given, options, result);
  run(cuda::select_jvp(packed.params), packed.params, given.query.options());
  return result;
}

Gradients attention_double_backward_cuda(const AttentionDoubleBackwardTensors& given,
                                         const AttentionBackwardOptions& options) {
  check_storages(given);
  check_attention_double_backward(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const Gradients result = empty_gradients(given.forward(), GradMask(options.grad_mask));
  const PackedDoubleBackward packed = pack_double_backward(given, options, result, given.query.size(0));
  run(cuda::select_double_backward(packed.params), packed.params, given.query.options());
  store_per_head_gradients(packed.backward, result);
  return result;
}

WeightsResult weights_cuda(const WeightsTensors& given, const WeightsOptions& options) {
  check_storages(given);
  check_weights(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const at::Tensor weights = empty_weights(given);
  const PackedWeights packed = pack_weights(given, options, weights);
  run(cuda::select_weights(packed.params), packed.params, given.query.options());
  return {weights};
}

Gradients weights_backward_cuda(const WeightsBackwardTensors& given, const WeightsBackwardOptions& options) {
  check_storages(given);
  check_weights_backward(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const Gradients result = empty_gradients(given.forward().attention(), GradMask(options.grad_mask));
  const PackedBackward packed = pack_weights_backward(given, options, result);
  run(cuda::select_backward(packed.params), packed.params, given.query.options());
  store_per_head_gradients(packed, result);
  return result;
}

AttentionResult varlen_cuda(const VarlenTensors& given, const VarlenOptions& options) {
  check_storages(given);
  check_varlen(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  AttentionResult result = empty_varlen_result(given);
  const PackedVarlen packed = pack_varlen(given, options, result);
  run(cuda::select_forward(packed.params), packed.params, given.query.options());
  return result;
}

AttentionResult cache_cuda(const CacheTensors& given, const CacheOptions& options) {
  check_storages(given);
  check_cache(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  AttentionResult result = empty_cache_result(given);
  const PackedCache packed = pack_cache(given, options, result);
  run(cuda::select_forward(packed.params), packed.params, given.query.options());
  return result;
}

Gradients varlen_backward_cuda(const VarlenBackwardTensors& given, const VarlenBackwardOptions& options) {
  check_storages(given);
  check_varlen_backward(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const Gradients result = empty_varlen_gradients(given.forward(), GradMask(options.grad_mask));
  const PackedVarlenBackward all = pack_varlen_backward(given, options, result);
  run(cuda::select_backward(all.packed.params), all.packed.params, given.query.options());
  store_per_head_gradients(all.packed, result);
  return result;
}

AttentionJvpResult varlen_jvp_cuda(const VarlenJvpTensors& given, const VarlenOptions& options) {
  check_storages(given);
  check_varlen_jvp(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const AttentionJvpResult result = empty_varlen_jvp_result(given.forward());
  const PackedVarlenJvp all = pack_varlen_jvp(given, options, result);
  run(cuda::select_jvp(all.packed.params), all.packed.params, given.query.options());
  return result;
}

Gradients varlen_double_backward_cuda(const VarlenDoubleBackwardTensors& given,
                                      const VarlenBackwardOptions& options) {
  check_storages(given);
  check_varlen_double_backward(given, options);
  const c10::cuda::CUDAGuard device_guard(given.query.device());
  const Gradients result = empty_varlen_gradients(given.forward(), GradMask(options.grad_mask));
  const PackedVarlenDoubleBackward all = pack_varlen_double_backward(given, options, result);
  run(cuda::select_double_backward(all.packed.params), all.packed.params, given.query.options());
  store_per_head_gradients(all.packed.backward, result);
  return result;
}

at::Tensor dropout_mask_cuda(const at::Tensor& rng_state, int64_t batch, int64_t heads, int64_t seqlen_q,
                             int64_t seqlen_k, double dropout_p, int64_t first_row) {
  check_dropout_mask(rng_state, {batch, heads, seqlen_q, seqlen_k}, dropout_p, first_row);
  const c10::cuda::CUDAGuard device_guard(rng_state.device());
  at::Tensor kept = at::empty({batch, heads, seqlen_q, seqlen_k}, rng_state.options().dtype(at::kBool));
  const DropoutParams dropout = pack_dropout(rng_state, dropout_p);
  Sizes sizes;
  sizes.batch = batch;
  sizes.heads = heads;
  sizes.seqlen_q = seqlen_q;
  sizes.seqlen_k = seqlen_k;
  C10_CUDA_CHECK(cuda::launch_dropout_mask(dropout, sizes, first_row, kept.mutable_data_ptr<bool>(),
                                           c10::cuda::getCurrentCUDAStream()));
  return kept;
}

template <class Params>
KernelChoice as_choice(cuda::Selection<Params> selection) {
  KernelChoice choice;
  choice.kernel = selection.tier;
  choice.refusal = selection.launch ? "" : refusal_of(selection);
  choice.why_not = std::move(selection.why_not);
  choice.workspace_bytes = static_cast<int64_t>(selection.workspace_bytes);
  return choice;
}

#else

[[noreturn]] void refuse() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "flash_attn on CUDA: this build has no CUDA half; install it again with "
                              "FLASH_ATTN_EXT_CUDA=1, a CUDA build of torch and nvcc");
}

// Bad arguments are said first, as where there are kernels.
template <class Op, void check(const typename Op::Tensors&, const typename Op::Options&)>
typename Op::Result refused(const typename Op::Tensors& given, const typename Op::Options& options) {
  check(given, options);
  refuse();
}

constexpr auto* attention_cuda = refused<Attention, check_attention>;
constexpr auto* attention_backward_cuda = refused<AttentionBackward, check_attention_backward>;
constexpr auto* attention_jvp_cuda = refused<AttentionJvp, check_attention_jvp>;
constexpr auto* attention_double_backward_cuda =
    refused<AttentionDoubleBackward, check_attention_double_backward>;
constexpr auto* weights_cuda = refused<AttentionWeights, check_weights>;
constexpr auto* weights_backward_cuda = refused<AttentionWeightsBackward, check_weights_backward>;
constexpr auto* varlen_cuda = refused<AttentionVarlen, check_varlen>;
constexpr auto* cache_cuda = refused<AttentionCache, check_cache>;
constexpr auto* varlen_backward_cuda = refused<AttentionVarlenBackward, check_varlen_backward>;
constexpr auto* varlen_jvp_cuda = refused<AttentionVarlenJvp, check_varlen_jvp>;
constexpr auto* varlen_double_backward_cuda =
    refused<AttentionVarlenDoubleBackward, check_varlen_double_backward>;

at::Tensor dropout_mask_cuda(const at::Tensor& rng_state, int64_t batch, int64_t heads, int64_t seqlen_q,
                             int64_t seqlen_k, double dropout_p, int64_t first_row) {
  check_dropout_mask(rng_state, {batch, heads, seqlen_q, seqlen_k}, dropout_p, first_row);
  refuse();
}

#endif

}  // namespace

#if defined(FLASH_ATTN_EXT_WITH_CUDA)

KernelChoice choose_on_cuda(const AttentionParams& params, at::Device device) {
  const c10::cuda::CUDAGuard device_guard(device);
  return as_choice(cuda::select_forward(params));
}

KernelChoice choose_on_cuda(const BackwardParams& params, at::Device device) {
  const c10::cuda::CUDAGuard device_guard(device);
  return as_choice(cuda::select_backward(params));
}

#else

KernelChoice choose_on_cuda(const AttentionParams&, at::Device) { refuse(); }
KernelChoice choose_on_cuda(const BackwardParams&, at::Device) { refuse(); }

#endif

TORCH_LIBRARY_IMPL(flash_attn_ext, CUDA, m) {
  implement<Attention, attention_cuda>(m);
  implement<AttentionBackward, attention_backward_cuda>(m);
  implement<AttentionVarlen, varlen_cuda>(m);
  implement<AttentionCache, cache_cuda>(m);
  implement<AttentionVarlenBackward, varlen_backward_cuda>(m);
  implement<AttentionVarlenJvp, varlen_jvp_cuda>(m);
  implement<AttentionVarlenDoubleBackward, varlen_double_backward_cuda>(m);
  implement<AttentionJvp, attention_jvp_cuda>(m);
  implement<AttentionDoubleBackward, attention_double_backward_cuda>(m);
  implement<AttentionWeights, weights_cuda>(m);
  implement<AttentionWeightsBackward, weights_backward_cuda>(m);
  m.impl("dropout_mask", dropout_mask_cuda);
}

}  // namespace flash_attn_ext
