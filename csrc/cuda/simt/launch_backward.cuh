// The backward's launches, in order.
#pragma once

#include "backward.cuh"
#include "backward_mask.cuh"

namespace flash_attn_ext::cuda::simt {

template <class In, class T = Accumulator<In>>
cudaError_t launch_row_terms(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const LaunchShape shape{z.batch * z.heads * ceil_div(z.seqlen_q, kBlockQ), 1, 1, kThreads,
                          sizeof(BackwardMemory<T>)};
  return launch(row_terms_kernel<In>, shape, stream, p, RowTerms<T>(workspace, z));
}

// All gradients that are wanted; of dq, dk and dv the flagged tiles.
template <class In, class T = Accumulator<In>>
cudaError_t launch_gradients(const BackwardParams& p, void* workspace, const RecomputeFlags& flags,
                             cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const RowTerms<T> terms(workspace, z);
  const int64_t heads = z.batch * z.heads;
  const int64_t query_tasks = heads * ceil_div(z.seqlen_q, kBlockQ);
  const int64_t key_tasks = z.batch * z.heads_kv * ceil_div(z.seqlen_k, kBlockK);
  const MaskPlan mask = plan_mask(z, p.dmask);
  const int64_t mask_elements = p.dmask.batch * p.dmask.heads * p.dmask.rows * p.dmask.cols;
  const auto run_split = [&](auto kernel, bool wanted, int64_t tasks, int64_t slices, int64_t splits,
                             const auto&... more) {
    const LaunchShape shape{wanted ? tasks : 0, slices, splits, kThreads, sizeof(BackwardMemory<T>)};
    return launch(kernel, shape, stream, p, terms, more...);
  };
  const auto run = [&](auto kernel, bool wanted, int64_t tasks, int64_t slices, const auto&... more) {
    return run_split(kernel, wanted, tasks, slices, 1, more...);
  };
  const bool narrow = slice_of(z.head_dim) == kNarrowSlice, narrow_v = slice_of(z.head_dim_v) == kNarrowSlice;
  const int64_t slices = ceil_div(z.head_dim, slice_of(z.head_dim));
  const int64_t slices_v = ceil_div(z.head_dim_v, slice_of(z.head_dim_v));
  return in_order(
      [&] {
        return run(narrow ? dq_kernel<In, kNarrowSlice> : dq_kernel<In, kMaxSlice>, p.dq || p.dalibi_slopes,
                   query_tasks, p.dq ? slices : 1, flags);
      },
      [&] {
        return run(narrow ? dkv_kernel<In, KeyGradient::kDk, kNarrowSlice>
                          : dkv_kernel<In, KeyGradient::kDk, kMaxSlice>,
                   bool(p.dk), key_tasks, slices, flags);
      },
      [&] {
        return run(narrow_v ? dkv_kernel<In, KeyGradient::kDv, kNarrowSlice>
                            : dkv_kernel<In, KeyGradient::kDv, kMaxSlice>,
                   bool(p.dv), key_tasks, slices_v, flags);
      },
      [&] { return run_split(dmask_kernel<In>, bool(p.dmask), mask.tasks, 1, mask.parts); },
      [&] {
        return run(dmask_sum_kernel<T>, p.dmask && mask.parts > 1, ceil_div(mask_elements, kThreads), 1);
      },
      [&] { return run(dslopes_kernel<T>, p.dalibi_slopes != nullptr, ceil_div(heads, kThreads), 1); });
}

template <class In>
cudaError_t launch_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return in_order([&] { return launch_row_terms<In>(p, workspace, stream); },
                  [&] { return launch_gradients<In>(p, workspace, {}, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
