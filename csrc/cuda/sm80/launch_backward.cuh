// The backward's launches, in order.
#pragma once

#include "../simt/simt.h"
#include "backward.cuh"
#include "sm80.h"

namespace flash_attn_ext::cuda::sm80 {

template <class C>
cudaError_t launch_padded(const BackwardParams& p, const BackwardWorkspace& w, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const int64_t key_tasks = z.batch * z.heads_kv * ceil_div(z.seqlen_k, C::kBlockK);
  const int64_t query_tasks = p.dq ? z.batch * z.heads * RecomputeFlags::tiles(z.seqlen_q) : 0;
  return in_order(
      [&] {
        const LaunchShape shape{key_tasks, 1, 1, C::kThreads, sizeof(BackwardMemory<C>)};
        return launch(backward_kernel<C>, shape, stream, p, w);
      },
      [&] { return launch(dq_kernel<C>, {query_tasks, 1, 1, C::kThreads}, stream, p, w); });
}

template <class In, bool kPacked>
cudaError_t launch_backward_of(const BackwardParams& p, const BackwardWorkspace& w, cudaStream_t stream) {
  switch (padded_head_dim(p.sizes)) {
    case 64: return launch_padded<BackwardConfig<In, 64, kPacked>>(p, w, stream);    // 73 KB
    case 128: return launch_padded<BackwardConfig<In, 128, kPacked>>(p, w, stream);  // 97 KB
    case 192: return launch_padded<BackwardConfig<In, 192, kPacked>>(p, w, stream);  // 93 KB
    case 256: return launch_padded<BackwardConfig<In, 256, kPacked>>(p, w, stream);  // 97 KB
  }
  return cudaErrorInvalidValue;
}

// simt's kernels compute the terms of the rows before, and the flagged tiles once more after. They also
// compute the gradients of the mask and the slopes: sums of dS, which need no tensor cores.
template <class In>
cudaError_t launch_backward(const BackwardParams& p, void* workspace, cudaStream_t stream,
                            simt::ComputeRowTerms<float>* row_terms, simt::ComputeGradients* gradients) {
  Arena arena(workspace);
  const auto w = BackwardWorkspace::plan(arena, p);
  BackwardParams qkv = p, others = p;
  qkv.dmask = {};
  qkv.dalibi_slopes = qkv.dsink = nullptr;
  others.dq = others.dk = others.dv = {};
  const auto on_tensor_cores = [&] {
    return p.varlen ? launch_backward_of<In, true>(p, w, stream)
                    : launch_backward_of<In, false>(p, w, stream);
  };
  const auto qkv_pass = [&] {
    return in_order([&] { return cudaMemsetAsync(w.ticket, 0, w.zeroed_bytes, stream); }, on_tensor_cores,
                    [&] { return gradients(qkv, w.simt, w.flags, stream); });
  };
  return in_order([&] { return row_terms(p, w.simt.rows, stream); },
                  [&] { return p.dq || p.dk || p.dv ? qkv_pass() : cudaSuccess; },
                  [&] { return gradients(others, w.simt, {}, stream); });
}

}  // namespace flash_attn_ext::cuda::sm80
