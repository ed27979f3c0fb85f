#include "combine.h"

#include "../core/sequence.h"
#include "../core/splits.h"
#include "lanes.cuh"
#include "launch.h"
#include "scores.cuh"

namespace flash_attn_ext::cuda {
constexpr int kWarp = 32, kThreads = 128;

// A warp computes 32 columns of a row, one column for each lane. Decoding waits for this kernel, so few of its reads
// depend on each other: lane n reads the statistics of split n.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const AttentionParams call, int64_t splits, const Partials<T> partials, int64_t slices) {
  const Sizes& z = call.sizes;
  const int lane = threadIdx.x % kWarp;
  const int64_t task = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t padded = task / slices, slice = task % slices, col = slice * kWarp + lane;
  if (padded >= z.batch * z.heads * z.seqlen_q) return;
  const int64_t b = padded / z.seqlen_q / z.heads, h = padded / z.seqlen_q % z.heads, i = padded % z.seqlen_q;
  const AttentionParams p = of_sequence(call, b);
  if (i >= p.sizes.seqlen_q) return;  // this sequence is shorter than the longest sequence
  const int64_t row = p.lse_index(b, h, i), rows = call.lse_size();

  T max = -kInf<T>;
  for (int64_t n = lane; n < splits; n += kWarp) max = larger(max, partials.row_max[n * rows + row]);
  max = maximum_of_lanes<kWarp>(max);
  const T reference = max == -kInf<T> ? T(0) : max;  // nothing visible: all factors are 0

  T sum = 0, total = 0;
  for (int64_t n0 = 0; n0 < splits; n0 += kWarp) {
    const int64_t n = n0 + lane;
    const T factor = n < splits ? std::exp(partials.row_max[n * rows + row] - reference) : T(0);
    if (n < splits) sum += partials.row_sum[n * rows + row] * factor;
    const int count = static_cast<int>(smaller<int64_t>(splits - n0, kWarp));
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const T factor_i = __shfl_sync(0xffffffffu, factor, i);
      if (col < z.head_dim_v) total += partials.out[((n0 + i) * rows + row) * z.head_dim_v + col] * factor_i;
    }
  }
  const RowResult<T> result = finish_row(p, b, h, max, total_of_lanes<kWarp>(sum));

  if (col < z.head_dim_v) p.out.row<In>(b, h, i)[col] = round_to<In>(total * result.out_factor);
  if (slice == 0 && lane == 0) static_cast<T*>(p.lse)[row] = result.lse;
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_of(const AttentionParams& p, int64_t splits, void* workspace, cudaStream_t stream) {
  constexpr int64_t kWarps = kThreads / kWarp;
  const Sizes& z = p.sizes;
  const int64_t slices = ceil_div(z.head_dim_v, kWarp);
  const int64_t warps = z.batch * z.heads * z.seqlen_q * slices;
  return launch(combine_kernel<In>, {ceil_div(warps, kWarps), 1, 1, kThreads}, stream, p, splits,
                Partials<T>(workspace, p, splits), slices);
}

cudaError_t launch_combine(const AttentionParams& p, int64_t splits, void* workspace, cudaStream_t stream) {
  if (splits == 1) return cudaSuccess;
  switch (p.dtype) {
    case DType::kFloat32: return launch_of<float>(p, splits, workspace, stream);
    case DType::kFloat64: return launch_of<double>(p, splits, workspace, stream);
    case DType::kBFloat16: return launch_of<__nv_bfloat16>(p, splits, workspace, stream);
    case DType::kFloat16: return launch_of<__half>(p, splits, workspace, stream);
    case DType::kBool: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::cuda
