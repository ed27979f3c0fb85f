// The backward's launches, in order.
#pragma once

#include "../sink.cuh"
#include "backward.cuh"
#include "backward_mask.cuh"

namespace flash_attn_ext::cuda::simt {

template <class In, class T = Accumulator<In>>
cudaError_t launch_row_terms(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const LaunchShape shape{z.batch * z.heads * ceil_div(z.seqlen_q, kBlockQ), 1, 1, kThreads,
                          sizeof(BackwardMemory<T>)};
  return launch(row_terms_kernel<In>, shape, stream, p, RowTerms<T>(workspace, p));
}

// Columns of dk and dv that a block owns: of fp64, more would not fit into registers.
template <class T>
constexpr int64_t key_gradient_slice(int64_t columns) {
  return sizeof(T) == sizeof(double) ? kNarrowSlice : slice_of(columns);
}

template <class In, KeyGradient kWhich, class T = Accumulator<In>>
auto dkv_kernel_for(int64_t columns) {
  if constexpr (key_gradient_slice<T>(kMaxSlice) == kMaxSlice) {
    if (key_gradient_slice<T>(columns) == kMaxSlice) return dkv_kernel<In, kWhich, kMaxSlice>;
  }
  return dkv_kernel<In, kWhich, kNarrowSlice>;
}

// All gradients that are wanted; of dq, dk and dv the flagged tiles.
template <class In, class T = Accumulator<In>>
cudaError_t launch_gradients(const BackwardParams& p, void* workspace, const RecomputeFlags& flags,
                             cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const RowTerms<T> terms(workspace, p);
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
  const bool narrow = slice_of(z.head_dim) == kNarrowSlice;
  const int64_t slices = ceil_div(z.head_dim, slice_of(z.head_dim));
  return in_order(
      [&] {
        return run(narrow ? dq_kernel<In, kNarrowSlice> : dq_kernel<In, kMaxSlice>, p.dq || p.dalibi_slopes,
                   query_tasks, p.dq ? slices : 1, flags);
      },
      [&] {
        return run(dkv_kernel_for<In, KeyGradient::kDk>(z.head_dim), bool(p.dk), key_tasks,
                   ceil_div(z.head_dim, key_gradient_slice<T>(z.head_dim)), flags);
      },
      [&] {
        return run(dkv_kernel_for<In, KeyGradient::kDv>(z.head_dim_v), bool(p.dv), key_tasks,
                   ceil_div(z.head_dim_v, key_gradient_slice<T>(z.head_dim_v)), flags);
      },
      [&] { return run_split(dmask_kernel<In>, bool(p.dmask), mask.tasks, 1, mask.parts); },
      [&] {
        return run(dmask_sum_kernel<T>, p.dmask && mask.parts > 1, ceil_div(mask_elements, kThreads), 1);
      },
      [&] { return run(dslopes_kernel<T>, p.dalibi_slopes != nullptr, ceil_div(heads, kThreads), 1); },
      [&] { return launch_sink_gradient(p, terms.delta, z.seqlen_q, stream); });
}

template <class In>
cudaError_t launch_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return in_order([&] { return launch_row_terms<In>(p, workspace, stream); },
                  [&] { return launch_gradients<In>(p, workspace, {}, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
