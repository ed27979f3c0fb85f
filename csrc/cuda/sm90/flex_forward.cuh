// Forward with functions of the user and block masks: the loop of forward.cuh, on the tiles that tile_lists.cuh lists.
#pragma once

#include "forward_launch.cuh"
#include "mask_function.cuh"
#include "tile_lists.cuh"

namespace flash_attn_ext::cuda::sm90 {

template <class In, int kHeadDim, Form kForm>
cudaError_t launch_flex_tiles(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  using Config = Forward<In, kHeadDim, kHeadDim, kForm>;
  Arena arena(workspace);
  const auto w = FlexWorkspace::lay_out(arena, p);
  typename Config::Arguments a{
      FlexArguments{forward_arguments<Config>(p, {}, w.key_mask, Partials<float>(nullptr, p, 1)), w.lists,
                    w.functions, nullptr}};
  const ForwardTasks tasks{a.schedule, w.lists};
  if (tasks.groups().are_sorted()) a.sorted_tasks = w.order;
  const LaunchShape shape{a.schedule.tasks, 1, 1, Config::kThreads, sizeof(typename Config::Shared)};
  return in_order([&] { return map_tensors<Config>(a); },
                  [&] { return simt::launch_store_functions(p, w.functions, stream); },
                  [&] { return launch_key_mask<Config::kKeys>(p, w.key_mask, stream); },
                  [&] {
                    return launch(tile_lists_kernel, shape_of_lists(w.lists), stream, p, w.functions, w.lists,
                                  w.key_mask, Config::kRows, Config::kKeys);
                  },
                  [&] { return a.sorted_tasks ? launch_task_order(tasks, w.order, stream) : cudaSuccess; },
                  [&] { return launch(forward_kernel<In, kHeadDim, kHeadDim, kForm>, shape, stream, a); });
}

// Three kernels of a form, kFunctions or kScores, for all calls, packed or not.
template <class In, Form kForm>
cudaError_t launch_flex_forward(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  switch (forward_head_dims(p.sizes, kForm).qk) {
    case 64: return launch_flex_tiles<In, 64, kForm>(p, workspace, stream);
    case 128: return launch_flex_tiles<In, 128, kForm>(p, workspace, stream);
    case 256: return launch_flex_tiles<In, 256, kForm>(p, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::cuda::sm90
