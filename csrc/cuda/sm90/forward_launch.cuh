// The launch of the forward: arguments, tensor maps, and the kernel for a call.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "forward.cuh"
#include "sm90.h"
#include "tensor_map.h"

namespace flash_attn_ext::cuda::sm90 {

// The arguments without the tensor maps.
template <class Config>
ForwardArguments forward_arguments(const AttentionParams& p, const FewRows& few, const KeyMask& key_mask,
                                   const Partials<float>& partials) {
  const Sizes& z = p.sizes;
  return {{},
          {},
          {},
          {},
          p,
          Config::kFewRows ? schedule_few_rows(z, few) : schedule_forward(z, Config::kRows),
          {},
          {},
          SequenceRows(p),
          ScoreScale(p),
          ShortBand(p),
          key_mask,
          few,
          partials};
}

template <class Config>
cudaError_t map_tensors(ForwardArguments& a) {
  const AttentionParams& p = a.p;
  const FewRows& few = a.few_rows;
  const Sizes& z = p.sizes;
  const TensorMaps maps(p);
  const auto map_queries = [&] {
    return Config::kFewRows ? maps.of_groups(a.q, p.q, z.head_dim, few.tile_queries(), few.tile_heads())
                            : maps.of_queries(a.q, p.q, z.head_dim, Config::kRows);
  };
  return in_order(
      map_queries,  //
      [&] { return maps.of_keys(a.k, p.k, z.head_dim, Config::kKeys); },
      [&] { return maps.of_keys(a.v, p.v, z.head_dim_v, Config::kKeys); },
      [&] {
        return Config::kStoresByTma ? maps.of_queries(a.out, p.out, z.head_dim_v, Config::kRows)
                                    : cudaSuccess;
      });
}

template <class In, int kHeadDim, int kHeadDimV, Form kForm>
cudaError_t launch_tiles(const AttentionParams& p, const FewRows& few, void* workspace, cudaStream_t stream) {
  using Config = Forward<In, kHeadDim, kHeadDimV, kForm>;
  Arena arena(workspace);
  const auto memory = ForwardWorkspace::lay_out(arena, p, {kForm, Config::kDims, few});
  ForwardArguments a = forward_arguments<Config>(p, few, memory.key_mask, memory.partials);
  int64_t blocks = a.schedule.tasks;
  if (Config::kPersistent && memory.sorted) {
    blocks = memory.sorted.blocks;
    a.schedule = memory.sorted.schedule(p.sizes, Config::kRows);
  } else if (Config::kPersistent && !SortedRounds::needs_sorting(p)) {
    blocks = std::min(blocks, most_persistent_blocks());
    a.rounds = deal_tasks(p, Config::kRows, Config::kKeys, static_cast<int>(blocks));
  }
  a.sorted = memory.sorted;
  const LaunchShape shape{blocks, 1, few.splits, Config::kThreads, sizeof(typename Config::Shared)};
  static_assert(sizeof(ForwardArguments) <= 4096);
  return in_order([&] { return map_tensors<Config>(a); },
                  [&] { return launch_key_mask<Config::kKeys>(p, a.key_mask, stream); },
                  [&] {
                    if constexpr (Config::kPersistent && !Config::kPlain)
                      if (a.sorted)
                        return launch_make_rounds(a.sorted, p, a.key_mask, Config::kRows, Config::kKeys,
                                                  stream);
                    return cudaSuccess;
                  },
                  [&] { return launch(forward_kernel<In, kHeadDim, kHeadDimV, kForm>, shape, stream, a); },
                  [&] { return launch_combine(p, few.splits, workspace, stream); });
}

template <class In, int kHeadDim, int kHeadDimV>
cudaError_t launch_many_rows(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return is_plain(p) ? launch_tiles<In, kHeadDim, kHeadDimV, Form::kPlain>(p, {}, workspace, stream)
                     : launch_tiles<In, kHeadDim, kHeadDimV, Form::kOptions>(p, {}, workspace, stream);
}

template <class In, int kHeadDim>
cudaError_t launch_any_rows(const AttentionParams& p, const ForwardChoice& choice, void* workspace,
                            cudaStream_t stream) {
  return choice.form == Form::kFewRows
             ? launch_tiles<In, kHeadDim, kHeadDim, Form::kFewRows>(p, choice.few_rows, workspace, stream)
             : launch_many_rows<In, kHeadDim, kHeadDim>(p, workspace, stream);
}

template <class In>
cudaError_t launch_forward(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  const ForwardChoice choice = choose_forward(p);
  switch (choice.head_dims.qk) {
    case 64: return launch_any_rows<In, 64>(p, choice, workspace, stream);
    case 96: return launch_many_rows<In, 96, 96>(p, workspace, stream);
    case 128: return launch_any_rows<In, 128>(p, choice, workspace, stream);
    case 192:
      return choice.head_dims.v == 128 ? launch_many_rows<In, 192, 128>(p, workspace, stream)
                                       : launch_many_rows<In, 192, 192>(p, workspace, stream);
    case 256: return launch_any_rows<In, 256>(p, choice, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::cuda::sm90
