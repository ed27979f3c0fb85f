// The backward's launches, in order.
#pragma once

#include "../simt/simt.h"
#include "backward.cuh"
#include "repair.cuh"
#include "sm80.h"

namespace flash_attn_ext::cuda::sm80 {

template <class C, class Functions = NoFunctions>
cudaError_t launch_padded(const BackwardParams& p, const BackwardWorkspace& w, cudaStream_t stream,
                          const Functions& functions = {}) {
  const Sizes& z = p.sizes;
  const int64_t key_tasks = z.batch * z.heads_kv * ceil_div(z.seqlen_k, C::kBlockK);
  const int64_t query_tasks = p.dq ? z.batch * z.heads * NanFlags::tiles(z.seqlen_q) : 0;
  return in_order(
      [&] {
        const LaunchShape shape{key_tasks, 1, 1, C::kThreads, sizeof(BackwardMemory<C>)};
        return launch(backward_kernel<C, Functions>, shape, stream, p, w, functions);
      },
      [&] {
        constexpr auto kForm = C::kPacked ? BackwardForm::kPlainPacked : BackwardForm::kPlain;
        return launch(dq_kernel<BackwardConfig<typename C::In, C::kHeadDim, kForm, typename C::Gpu>>,
                      {query_tasks, 1, 1, C::kThreads}, stream, p, w);
      });
}

template <class In, BackwardForm kForm, class Gpu>
cudaError_t launch_backward_of(const BackwardParams& p, const BackwardWorkspace& w, cudaStream_t stream) {
  const int padded = padded_head_dim(p.sizes);
  // Shared memory: 73, 97, 93 and 97 KB; on compute capability 7.5: 49 and 57 KB.
  if (padded == 64) return launch_padded<BackwardConfig<In, 64, kForm, Gpu>>(p, w, stream);
  if (padded == 128) return launch_padded<BackwardConfig<In, 128, kForm, Gpu>>(p, w, stream);
  if constexpr (Gpu::kAsyncCopies) {
    if (padded == 192) return launch_padded<BackwardConfig<In, 192, kForm, Gpu>>(p, w, stream);
    if (padded == 256) return launch_padded<BackwardConfig<In, 256, kForm, Gpu>>(p, w, stream);
  }
  return cudaErrorInvalidValue;
}

// simt's kernels first compute the row terms. Last, they compute the gradients of mask, slopes and sink: sums of dS,
// without tensor cores.
template <class In, class Gpu = Ampere>
cudaError_t launch_backward(const BackwardParams& p, void* workspace, cudaStream_t stream,
                            simt::ComputeRowTerms<float>* row_terms, simt::ComputeGradients* gradients) {
  Arena arena(workspace);
  const auto w = BackwardWorkspace::lay_out<Gpu>(arena, p);
  BackwardParams sums_of_dscores = p;
  sums_of_dscores.dq = sums_of_dscores.dk = sums_of_dscores.dv = {};
  const auto on_tensor_cores = [&] {
    if (p.dropout) return launch_backward_of<In, BackwardForm::kDropout, Gpu>(p, w, stream);
    if (!is_plain(p)) return launch_backward_of<In, BackwardForm::kOptions, Gpu>(p, w, stream);
    return p.varlen ? launch_backward_of<In, BackwardForm::kPlainPacked, Gpu>(p, w, stream)
                    : launch_backward_of<In, BackwardForm::kPlain, Gpu>(p, w, stream);
  };
  const auto qkv_pass = [&] {
    return in_order([&] { return cudaMemsetAsync(w.ticket, 0, w.zeroed_bytes, stream); }, on_tensor_cores,
                    [&] { return launch_repair<In, Gpu>(p, w, stream); });
  };
  return in_order([&] { return row_terms(p, w.simt.rows, stream); },
                  [&] { return p.dq || p.dk || p.dv ? qkv_pass() : cudaSuccess; },
                  [&] { return gradients(sums_of_dscores, w.simt, stream); });
}

}  // namespace flash_attn_ext::cuda::sm80
