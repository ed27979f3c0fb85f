// CUDA key: checks, allocates, packs, selects a tier, and launches on the current stream.
//
// No function here waits for the GPU, and memory is from torch's allocator. So a CUDA graph can capture a call. The
// kernels are compiled and tested on the host (tests/cuda_host).

#include "../declarations/implement.h"
#include "../declarations/library.h"
#include "../indexer/indexer.h"
#include "../operators.h"
#include "plan.h"

#if defined(FLASH_ATTN_EXT_WITH_CUDA)
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../../cuda/select.h"
#endif

namespace flash_attn_ext {
namespace {

#if defined(FLASH_ATTN_EXT_WITH_CUDA)

template <class Params>
std::string refusal_of(const cuda::Selection<Params>& selection) {
  return "flash_attn on CUDA: " + selection.reason;
}

auto select(const AttentionParams& params) { return cuda::select_forward(params); }
auto select(const BackwardParams& params) { return cuda::select_backward(params); }
auto select(const JvpParams& params) { return cuda::select_jvp(params); }
auto select(const DoubleBackwardParams& params) { return cuda::select_double_backward(params); }
auto select(const WeightsParams& params) { return cuda::select_weights(params); }
auto select(const IndexedParams& params) { return cuda::select_indexed(params); }
auto select(const IndexedBackwardParams& params) { return cuda::select_indexed_backward(params); }
auto select(const IndexerScoresParams& params) { return cuda::select_indexer_scores(params); }
auto select(const IndexerScoresBackwardParams& params) {
  return cuda::select_indexer_scores_backward(params);
}
auto select(const IndexerLossParams& params) { return cuda::select_indexer_loss(params); }
auto select(const IndexerLossBackwardParams& params) { return cuda::select_indexer_loss_backward(params); }

// The allocator gives the freed workspace only to work that comes later on this stream.
template <class Params>
void run(const Params& params, const at::TensorOptions& options) {
  const auto selection = select(params);
  TORCH_CHECK_NOT_IMPLEMENTED(selection.launch, refusal_of(selection));
  const at::Tensor workspace =
      at::empty({static_cast<int64_t>(selection.workspace_bytes)}, options.dtype(at::kByte));
  C10_CUDA_CHECK(selection.launch(params, workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
}

template <class Params>
void run_indexer(const Params& params, const at::Tensor& q) {
  const c10::cuda::CUDAGuard device_guard(q.device());
  run(params, q.options());
}

template <class Op>
typename Op::Result on_cuda(const typename Op::Tensors& given, const typename Op::Options& options) {
  return compute<Op>(given, options, [&](const typename Op::Result& result) {
    const c10::cuda::CUDAGuard device_guard(given.query.device());
    pack_and_run<Op>(given, options, result,
                     [&](const Packed<Op>& packed) { run(packed.params, given.query.options()); });
  });
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

template <class Params>
void run_indexer(const Params&, const at::Tensor&) {
  refuse();
}

// A bad argument raises its own error first, as in a build with CUDA.
template <class Op>
typename Op::Result on_cuda(const typename Op::Tensors& given, const typename Op::Options& options) {
  Op::check(given, options);
  check_contents(given, options);
  refuse();
}

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
  return as_choice(select(params));
}

KernelChoice choose_on_cuda(const BackwardParams& params, at::Device device) {
  const c10::cuda::CUDAGuard device_guard(device);
  return as_choice(select(params));
}

#else

KernelChoice choose_on_cuda(const AttentionParams&, at::Device) { refuse(); }
KernelChoice choose_on_cuda(const BackwardParams&, at::Device) { refuse(); }

#endif

namespace indexer {
void run_on_cuda(const IndexerScoresParams& p, const at::Tensor& q) { run_indexer(p, q); }
void run_on_cuda(const IndexerScoresBackwardParams& p, const at::Tensor& q) { run_indexer(p, q); }
void run_on_cuda(const IndexerLossParams& p, const at::Tensor& q) { run_indexer(p, q); }
void run_on_cuda(const IndexerLossBackwardParams& p, const at::Tensor& q) { run_indexer(p, q); }
}  // namespace indexer

FA_LIBRARY_IMPL(CUDA, m) {
  for_each_operator(KernelOperators{}, [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    implement<Op, on_cuda<Op>>(m);
  });
  m.impl("dropout_mask", dropout_mask_cuda);
}

}  // namespace flash_attn_ext
