// Backward with functions of the user and block masks: the kernels of backward.cuh with another pass, which runs the
// programs and skips tiles that the block mask hides.
#pragma once

#include "flex.cuh"
#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

// P and dS of one tile. dS is the gradient of the score before the user's function.
template <class In_>
struct FlexPass : BackwardPass<In_> {
  using Base = BackwardPass<In_>;
  using typename Base::In, typename Base::T, typename Base::Params, typename Base::Memory;
  using Workspace = FlexBackwardWorkspace<T>;
  static constexpr bool kHasFunctions = true;

  static __device__ bool is_hidden(const Params& p, const Workspace& w, const TilePosition& at) {
    return simt::is_hidden(p, *w.functions, at, Base::kTileRows);
  }

  static __device__ Element<T> element(const Params& p, const Workspace& w, PhiloxKey key,
                                       const TilePosition& at, const TileChunks& chunks, int row, int col,
                                       T product, T dprob) {
    const DeviceFunctions& functions = *w.functions;
    const int64_t i = at.i0 + row, j = at.j0 + col;
    const FlexScore<T> score = finish_score(p, functions, chunks, product, at.b, at.h, i, j);
    if (score.value == -kInf<T>) return {T(0), T(0), T(0), score.attends};  // for every dP and lse

    const int64_t n = p.lse_index(at.b, at.h, i);
    const T prob = probability(w.rows, n, score.value);
    const T factor = p.dropout ? dropout_factor<T>(p, key, at.b, at.h, i, j) : T(1);
    T dscore = prob * (dprob * factor - w.rows.delta[n]);
    // 0 stays 0, whatever the function's derivative is.
    if (functions.gradient && dscore != T(0))
      dscore = number_of<T>(
          run_program(&functions, functions.gradient,
                      ProgramPoint<T>{at.b, at.h, first_query_index(p) + i, j, score.old, dscore}));
    T dproduct = dscore * static_cast<T>(p.scale);
    if (p.softcap > 0) dproduct *= T(1) - score.tanh * score.tanh;
    return {prob * factor, dscore, dproduct, score.attends};
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

template <class In, class T = Accumulator<In>>
cudaError_t launch_flex_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  using Pass = FlexPass<In>;
  Arena arena(workspace);
  const auto w = FlexBackwardWorkspace<T>::lay_out(arena, p);
  const Sizes& z = p.sizes;
  constexpr int64_t kKeySlice = key_gradient_slice<T>(kMaxSlice);
  const int64_t heads = z.batch * z.heads, query_blocks = ceil_div(z.seqlen_q, Pass::kTileRows);
  const int64_t key_tasks = z.batch * z.heads_kv * ceil_div(z.seqlen_k, kBlockK);
  const auto shape_of = [](bool wanted, int64_t tasks, int64_t slices) {
    return LaunchShape{wanted ? tasks : 0, slices, 1, kThreads, sizeof(typename Pass::Memory)};
  };
  const LaunchShape rows{heads * ceil_div(z.seqlen_q, kBlockQ), 1, 1, kThreads,
                         sizeof(SharedMemory<T, kBlockQ>)};
  return in_order(
      [&] { return launch_store_functions(p, w.functions, stream); },
      [&] { return launch(flex_row_terms_kernel<In>, rows, stream, p, w.rows, w.functions); },
      [&] {
        return launch(dq_kernel<Pass, kMaxSlice>,
                      shape_of(p.dq || p.dalibi_slopes, heads * query_blocks,
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
        return launch(dslopes_kernel<T>,
                      LaunchShape{p.dalibi_slopes ? ceil_div(heads, kThreads) : 0, 1, 1, kThreads}, stream,
                      static_cast<T*>(p.dalibi_slopes), heads, w.dslopes, query_blocks);
      },
      [&] { return launch_sink_gradient(p, w.rows.delta, RowOfLse{}, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
