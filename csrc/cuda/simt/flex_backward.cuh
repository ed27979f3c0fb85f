// Backward with functions of the user and block masks: the kernels of backward.cuh with another pass. This pass runs
// the programs and skips tiles that the block mask hides.
#pragma once

#include "flex.cuh"
#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

template <class T>
struct FlexElement : Element<T> {
  T old;   // the score before the user's function
  T dnew;  // the gradient of the function's result

  __device__ T dmask() const { return dnew; }  // attn_mask is added to the function's result
};

// P and dS of one tile. dS is the gradient of the score before the user's function.
template <class In_>
struct FlexPass : BackwardPass<In_> {
  using Base = BackwardPass<In_>;
  using typename Base::In, typename Base::T, typename Base::Params, typename Base::Memory;
  using Workspace = FlexBackwardWorkspace<T>;
  static constexpr bool kTakesDweights = false, kHasFunctions = true;

  static __device__ bool is_hidden(const Params& p, const Workspace& w, const TilePosition& at) {
    return simt::is_hidden(p, *w.functions, at, Base::kTileRows);
  }

  static __device__ FlexElement<T> element(const Params& p, const Workspace& w, PhiloxKey key,
                                           const TilePosition& at, const TileChunks& chunks, int row, int col,
                                           T product, T dprob) {
    const DeviceFunctions& functions = *w.functions;
    const int64_t i = at.i0 + row, j = at.j0 + col;
    const FlexScore<T> score = finish_score(p, functions, chunks, product, at.b, at.h, i, j);
    if (score.value == -kInf<T>)
      return {{T(0), T(0), T(0), score.attends}, T(0), T(0)};  // for every dP and lse

    const int64_t n = p.lse_index(at.b, at.h, i);
    const T prob = probability(w.rows, n, score.value);
    const T factor = p.dropout ? dropout_factor<T>(p, key, at.b, at.h, i, j) : T(1);
    const T dnew = prob * (dprob * factor - w.rows.delta[n]);
    T dscore = dnew;
    // 0 stays 0, for every derivative of the function.
    if (functions.gradient && dscore != T(0))
      dscore = number_of<T>(
          run_program(&functions, functions.gradient,
                      ProgramPoint<T>{at.b, at.h, first_query_index(p) + i, j, score.old, dscore}));
    T dproduct = dscore * static_cast<T>(p.scale);
    if (p.softcap > 0) dproduct *= T(1) - score.tanh * score.tanh;
    return {{prob * factor, dscore, dproduct, score.attends}, score.old, dnew};
  }

  // Adds an element of the score matrix to the gradients of captured elements.
  static __device__ void add_to_captured(const Params& p, const Workspace& w, const TilePosition& at, int row,
                                         int col, const FlexElement<T>& element) {
    const DeviceFunctions& functions = *w.functions;
    if (!functions.captured_gradient || blockIdx.y != 0 || element.dnew == T(0)) return;
    run_program(&functions, functions.captured_gradient,
                ProgramPoint<T>{at.b, at.h, first_query_index(p) + at.i0 + row, at.j0 + col, element.old,
                                element.dnew});
  }

  template <bool kWithDscores, class Visit>
  static __device__ void recompute(const Params& p, const Workspace& w, PhiloxKey key, Memory& shared,
                                   const TilePosition& at, const Visit& visit) {
    recompute_tile<FlexPass, kWithDscores>(p, w, key, shared, at, visit);
  }
};

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    flex_row_terms_kernel(const BackwardParams call, const RowTerms<T> terms,
                          const DeviceFunctions* functions) {
  compute_row_terms<In>(call, terms, functions);
}

// Stores the functions on the GPU, and computes the terms of the rows.
template <class In, class T = Accumulator<In>>
cudaError_t launch_flex_row_terms(const BackwardParams& p, const FlexBackwardWorkspace<T>& w,
                                  cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const LaunchShape rows{z.batch * z.heads * ceil_div(z.seqlen_q, kBlockQ), 1, 1, kThreads,
                         sizeof(SharedMemory<T, kBlockQ>)};
  return in_order([&] { return launch_store_functions(p, w.functions, stream, w.captured); },
                  [&] { return launch(flex_row_terms_kernel<In>, rows, stream, p, w.rows, w.functions); });
}

// Computes the gradients that are wanted, after launch_flex_row_terms().
template <class In, class T = Accumulator<In>>
cudaError_t launch_flex_gradients(const BackwardParams& p, const FlexBackwardWorkspace<T>& w,
                                  cudaStream_t stream) {
  using Pass = FlexPass<In>;
  const Sizes& z = p.sizes;
  constexpr int64_t kKeySlice = key_gradient_slice<T>(kMaxSlice);
  const int64_t heads = z.batch * z.heads, query_blocks = ceil_div(z.seqlen_q, Pass::kTileRows);
  const int64_t key_tasks = z.batch * z.heads_kv * ceil_div(z.seqlen_k, kBlockK);
  const auto shape_of = [](bool wanted, int64_t tasks, int64_t slices) {
    return LaunchShape{wanted ? tasks : 0, slices, 1, kThreads, sizeof(typename Pass::Memory)};
  };
  const auto elementwise = [](bool wanted, int64_t elements) {
    return LaunchShape{wanted ? ceil_div(elements, kThreads) : 0, 1, 1, kThreads};
  };
  const MaskSchedule mask = schedule_mask(p, Pass::kTileRows);
  const int64_t mask_elements = p.dmask.batch * p.dmask.heads * p.dmask.rows * p.dmask.cols;
  // dq_kernel visits each element of the score matrix once, so it also adds to captured elements.
  const int64_t captured = w.captured ? p.functions->captured_count : 0;
  CapturedSums adds = w.captured;
  adds.pass = CapturedSums::kAdd;
  BackwardParams without_dq = p;
  without_dq.dq = {};
  without_dq.dalibi_slopes = nullptr;
  return in_order(
      [&] { return captured > 0 ? launch_clear_captured(w.captured, captured, stream) : cudaSuccess; },
      [&] {
        return launch(dq_kernel<Pass, kMaxSlice>,
                      shape_of(p.dq || p.dalibi_slopes || captured > 0, heads * query_blocks,
                               p.dq ? ceil_div(z.head_dim, kMaxSlice) : 1),
                      stream, p, w);
      },
      [&] {
        return launch(dkv_kernel<Pass, KeyGradient::kDk, kKeySlice>,
                      shape_of(bool(p.dk), key_tasks, ceil_div(z.head_dim, kKeySlice)), stream, p, w);
      },
      [&] {
        return launch(dkv_kernel<Pass, KeyGradient::kDv, kKeySlice>,
                      shape_of(bool(p.dv), key_tasks, ceil_div(z.head_dim_v, kKeySlice)), stream, p, w);
      },
      [&] {
        return launch(
            dmask_kernel<Pass>,
            LaunchShape{p.dmask ? mask.tasks : 0, 1, mask.parts, kThreads, sizeof(typename Pass::Memory)},
            stream, p, w);
      },
      [&] {
        return launch(dmask_sum_kernel<T>, elementwise(p.dmask && mask.parts > 1, mask_elements), stream,
                      p.dmask, p.mask.dtype, w.dmask_parts, mask.parts);
      },
      [&] {
        return launch(dslopes_kernel<T>, elementwise(p.dalibi_slopes != nullptr, heads), stream,
                      static_cast<T*>(p.dalibi_slopes), heads, w.dslopes, query_blocks);
      },
      [&] { return captured > 0 ? launch_store_functions(p, w.functions, stream, adds) : cudaSuccess; },
      [&] {
        return launch(dq_kernel<Pass, kMaxSlice>, shape_of(captured > 0, heads * query_blocks, 1), stream,
                      without_dq, w);
      },
      [&] { return captured > 0 ? launch_store_captured<T>(adds, *p.functions, stream) : cudaSuccess; },
      [&] { return launch_sink_gradient(p, w.rows.delta, RowOfLse{}, stream); });
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_flex_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = FlexBackwardWorkspace<T>::lay_out(arena, p);
  return in_order([&] { return launch_flex_row_terms<In>(p, w, stream); },
                  [&] { return launch_flex_gradients<In>(p, w, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
