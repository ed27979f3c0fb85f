// The backward's launches, in order.
#pragma once

#include "../sink.cuh"
#include "backward.cuh"
#include "backward_mask.cuh"
#include "weights.cuh"

namespace flash_attn_ext::cuda::simt {

template <class In, class T = Accumulator<In>>
cudaError_t launch_row_terms(const BackwardParams& p, const RowTerms<T>& rows, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const LaunchShape shape{z.batch * z.heads * ceil_div(z.seqlen_q, kBlockQ), 1, 1, kThreads,
                          sizeof(SharedMemory<T, kBlockQ>)};
  return launch(row_terms_kernel<In>, shape, stream, p, rows);
}

// Columns of dk and dv of a block. For fp64, more would not fit in registers.
template <class T>
constexpr int64_t key_gradient_slice(int64_t columns) {
  return sizeof(T) == sizeof(double) ? kNarrowSlice : slice_of(columns);
}

template <class Pass, KeyGradient kWhich, class T = typename Pass::T>
auto dkv_kernel_for(int64_t columns) {
  if constexpr (key_gradient_slice<T>(kMaxSlice) == kMaxSlice) {
    if (key_gradient_slice<T>(columns) == kMaxSlice) return dkv_kernel<Pass, kWhich, kMaxSlice>;
  }
  return dkv_kernel<Pass, kWhich, kNarrowSlice>;
}

// Launches a kernel for each gradient that is wanted, but not for the sink's.
template <class Pass>
cudaError_t launch_passes(const typename Pass::Params& p, const typename Pass::Workspace& w,
                          cudaStream_t stream) {
  using T = typename Pass::T;
  const Sizes& z = p.sizes;
  const int64_t heads = z.batch * z.heads, query_blocks = ceil_div(z.seqlen_q, Pass::kTileRows);
  const int64_t key_tasks = z.batch * z.heads_kv * ceil_div(z.seqlen_k, kBlockK);
  const MaskSchedule mask = schedule_mask(p, Pass::kTileRows);
  const int64_t mask_elements = p.dmask.batch * p.dmask.heads * p.dmask.rows * p.dmask.cols;
  const auto shape_of = [](bool wanted, int64_t tasks, int64_t slices = 1, int64_t splits = 1) {
    return LaunchShape{wanted ? tasks : 0, slices, splits, kThreads, sizeof(typename Pass::Memory)};
  };
  const auto elementwise = [](bool wanted, int64_t elements) {
    return LaunchShape{wanted ? ceil_div(elements, kThreads) : 0, 1, 1, kThreads};
  };
  const bool narrow = slice_of(z.head_dim) == kNarrowSlice;
  const int64_t slices = p.dq ? ceil_div(z.head_dim, slice_of(z.head_dim)) : 1;
  return in_order(
      [&] {
        return launch(narrow ? dq_kernel<Pass, kNarrowSlice> : dq_kernel<Pass, kMaxSlice>,
                      shape_of(p.dq || p.dalibi_slopes, heads * query_blocks, slices), stream, p, w);
      },
      [&] {
        return launch(
            dkv_kernel_for<Pass, KeyGradient::kDk>(z.head_dim),
            shape_of(bool(p.dk), key_tasks, ceil_div(z.head_dim, key_gradient_slice<T>(z.head_dim))), stream,
            p, w);
      },
      [&] {
        return launch(
            dkv_kernel_for<Pass, KeyGradient::kDv>(z.head_dim_v),
            shape_of(bool(p.dv), key_tasks, ceil_div(z.head_dim_v, key_gradient_slice<T>(z.head_dim_v))),
            stream, p, w);
      },
      [&] {
        return launch(dmask_kernel<Pass>, shape_of(bool(p.dmask), mask.tasks, 1, mask.parts), stream, p, w);
      },
      [&] {
        return launch(dmask_sum_kernel<T>, elementwise(p.dmask && mask.parts > 1, mask_elements), stream,
                      p.dmask, p.mask.dtype, w.dmask_parts, mask.parts);
      },
      [&] {
        return launch(dslopes_kernel<T>, elementwise(p.dalibi_slopes != nullptr, heads), stream,
                      static_cast<T*>(p.dalibi_slopes), heads, w.dslopes, query_blocks);
      });
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_gradients(const BackwardParams& p, const BackwardWorkspace<T>& w, cudaStream_t stream) {
  return in_order([&] { return launch_passes<BackwardPass<In>>(p, w, stream); },
                  [&] { return launch_sink_gradient(p, w.rows.delta, RowOfLse{}, stream); });
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = BackwardWorkspace<T>::lay_out(arena, p);
  return in_order([&] { return launch_row_terms<In>(p, w.rows, stream); },
                  [&] { return launch_delta_of_weights<In>(p, w, stream); },
                  [&] { return launch_gradients<In>(p, w, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
