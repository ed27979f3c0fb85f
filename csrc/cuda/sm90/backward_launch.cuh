// The launch of the backward: arguments, tensor maps, and the kernels for a call.
#pragma once

#include "../launch.h"
#include "../sink.cuh"
#include "backward.cuh"
#include "sm90.h"
#include "switches.h"
#include "tensor_map.h"

namespace flash_attn_ext::cuda::sm90 {

// The arguments without the tensor maps. `sharers`: as for KeyTileOrder.
inline BackwardArguments backward_arguments(const BackwardParams& p, void* workspace, int sharers = 1) {
  return {{},
          {},
          {},
          {},
          p,
          ShortBand(p),
          ScoreScale(p),
          BackwardWorkspace(workspace, p),
          KeyTileOrder(p, sharers),
          static_cast<int>(p.sizes.heads / p.sizes.heads_kv)};
}

// Launches the main kernel: a block for each tile of keys.
template <class In, class Config>
cudaError_t launch_keys_kernel(const typename Config::Arguments& a, cudaStream_t stream) {
  constexpr auto* kernel = &backward_kernel<In, Config::kHeadDim, Config::kHeadDimV, Config::kPlain, Config>;
  const Sizes& z = a.p.sizes;
  const LaunchShape by_keys{z.batch * z.heads_kv * a.order.tiles,
                            1,
                            1,
                            Config::kThreads,
                            sizeof(typename Config::Shared),
                            Config::kSharers};
  return launch(kernel, by_keys, stream, a);
}

// Launches everything but the kernel of the key mask.
template <class In, class Config>
cudaError_t launch_backward_kernels(typename Config::Arguments& a, cudaStream_t stream) {
  const BackwardParams& p = a.p;
  const BackwardWorkspace& w = a.w;
  const Sizes& z = p.sizes;
  const int64_t pieces = w.tiles.longest * (Config::kRows / kPieceRows);
  const LaunchShape by_rows{z.batch * z.heads * pieces, 1, 1, kWarpgroup};
  const TensorMaps maps(p);
  return in_order([&] { return maps.of_queries(a.q, p.q, z.head_dim, Config::kRows); },
                  [&] { return maps.of_queries(a.dout, p.dout, z.head_dim_v, Config::kRows); },
                  [&] { return maps.of_keys(a.k, p.k, z.head_dim, Config::kKeys); },
                  [&] { return maps.of_keys(a.v, p.v, z.head_dim_v, Config::kKeys); },
                  [&] { return launch(row_terms_kernel<In, Config>, by_rows, stream, p, w); },
                  [&] { return launch_keys_kernel<In, Config>(a, stream); },
                  [&] {
                    using Hidden = decltype(a.hidden());
                    return p.dq ? launch(dq_kernel<In, Config, Hidden>, by_rows, stream, p, w, a.hidden())
                                : cudaSuccess;
                  },
                  [&] { return launch_sink_gradient(p, w.delta, w.tiles, stream); });
}

template <class In, int kHeadDim, int kHeadDimV, bool kPlain, bool kPaired = false>
cudaError_t launch_backward_tiles(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  using Config = Backward<In, kHeadDim, kHeadDimV, kPlain, false, kPaired>;
  BackwardArguments a = backward_arguments(p, workspace, Config::kSharers);
  return in_order([&] { return launch_key_mask<Config::kKeys>(p, a.w.key_mask, stream); },
                  [&] { return launch_backward_kernels<In, Config>(a, stream); });
}

template <class In, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t launch_backward_head_dim(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  // The turns of a deterministic call are numbered for single blocks.
  if constexpr (FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS && kHeadDim == 256)
    if (is_plain(p) && !p.deterministic)
      return launch_backward_tiles<In, kHeadDim, kHeadDimV, true, true>(p, workspace, stream);
  return is_plain(p) ? launch_backward_tiles<In, kHeadDim, kHeadDimV, true>(p, workspace, stream)
                     : launch_backward_tiles<In, kHeadDim, kHeadDimV, false>(p, workspace, stream);
}

template <class In>
cudaError_t launch_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  const HeadDims dims = backward_head_dims(p);
  switch (dims.qk) {
    case 64: return launch_backward_head_dim<In, 64>(p, workspace, stream);
    case 96: return launch_backward_head_dim<In, 96>(p, workspace, stream);
    case 128: return launch_backward_head_dim<In, 128>(p, workspace, stream);
    case 192:
      return dims.v == 128 ? launch_backward_head_dim<In, 192, 128>(p, workspace, stream)
                           : launch_backward_head_dim<In, 192>(p, workspace, stream);
    case 256: return launch_backward_head_dim<In, 256>(p, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::cuda::sm90
