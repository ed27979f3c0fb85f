// Backward with mask functions and block masks: the loop of backward.cuh, on the tiles that query_lists.cuh lists.
#pragma once

#include "backward_launch.cuh"
#include "hidden_by_functions.cuh"
#include "query_lists.cuh"
#include "task_order.h"

namespace flash_attn_ext::cuda::sm90 {

struct FlexBackwardArguments;

// Iterates over the listed tiles of queries of a block, head after head.
struct ListedTileCursor {
  int head, tile = 0;
  TileState state = TileState::kFull;

  __device__ ListedTileCursor(const FlexBackwardArguments& a, const BackwardRange& range)
      : head(range.first_head) {
    advance(a, range);
  }
  __device__ void advance(const FlexBackwardArguments& a, const BackwardRange& range);

 private:
  int place_ = 0;  // of the tile in its list, from 1 on
};

struct FlexBackwardArguments : BackwardArguments {
  TileLists lists, turns;
  const simt::DeviceFunctions* functions;

  FA_HOST_DEVICE HiddenByFunctions hidden() const { return {functions}; }

  // Which elements of a thread's two keys, `key` and `key` + 8, the functions show: bit 16 r + 2 n + e is key + 8 r and
  // the thread's column 8 n + e. Tiles that are not full run the mask function where the band and the key mask show an
  // element.
  template <int kRows>
  __device__ uint32_t shown_elements(const BackwardRange& range, const ListedTileCursor& tile, int key,
                                     int first_row, uint32_t attends) const {
    static_assert(kRows <= 64);
    if (tile.state == TileState::kFull) return ~0u;
    const ShortBand& band = range.band;
    const int row = first_row + first_column_in_eight();
    uint32_t shown = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int end = min(band.end_row(key + 8 * r) - row, kRows);
      const uint32_t seen = columns_between(band.begin_row(key + 8 * r) - row, end);
      if (attends >> r & 1) shown |= seen << 16 * r;
    }
#pragma unroll 1
    for (uint32_t open = shown; open != 0; open &= open - 1) {
      const int bit = __ffs(open) - 1, column = bit % 16 / 2 * 8 + bit % 2;
      const simt::ProgramPoint<float> at{range.b, tile.head, row + column, key + bit / 16 * 8, 0, 0};
      if (!shows_element(functions, tile.state, at)) shown ^= 1u << bit;
    }
    return shown;
  }
};

__device__ inline void ListedTileCursor::advance(const FlexBackwardArguments& a, const BackwardRange& range) {
  ++place_;
#pragma unroll 1
  for (; head < range.first_head + range.heads; ++head, place_ = 1) {
    const int32_t* const list = a.lists.list(range.b, head, range.key_tile);
    if (place_ > list[0]) continue;
    const ListedTile listed(list[place_]);
    tile = listed.number;
    state = listed.state;
    return;
  }
}

__device__ inline int tiles_of(const FlexBackwardArguments& a, const BackwardRange& range) {
  int tiles = 0;
#pragma unroll 1
  for (int n = 0; n < range.heads; ++n)
    tiles += a.lists.list(range.b, range.first_head + n, range.key_tile)[0];
  return tiles;
}

template <class Config>
__device__ int turn_of(const FlexBackwardArguments& a, const BackwardRange& range,
                       const ListedTileCursor& at) {
  return a.turns.list(range.b, at.head, at.tile)[1 + range.key_tile];
}

// Of kernels with masks alone.
struct SortedBackwardArguments : FlexBackwardArguments {
  const int32_t* sorted_tasks;  // task_order.h; null: tasks are not sorted
};

__device__ inline int task_of_block(const SortedBackwardArguments& a) {
  return task_of_block(a.sorted_tasks);
}

template <class In, int kHeadDim>
struct FlexBackward : Backward<In, kHeadDim, kHeadDim, false, true> {
  using Arguments = SortedBackwardArguments;
  using Cursor = ListedTileCursor;
};

// Writes the lists, and launches the kernels of the backward. `sort`: launches the kernel that sorts the tasks, if any.
template <class In, class Config, class Sort>
cudaError_t launch_listed(const BackwardParams& p, const FlexBackwardWorkspace& w,
                          typename Config::Arguments& a, cudaStream_t stream, const Sort& sort) {
  const auto launch_lists = [&](auto* kernel, const TileLists& lists) {
    return launch(kernel, shape_of_lists(lists), stream, p, w.functions, lists, a.w.key_mask, Config::kRows,
                  Config::kKeys);
  };
  return in_order([&] { return launch_key_mask<Config::kKeys>(p, a.w.key_mask, stream); },
                  [&] { return launch_lists(query_lists_kernel, w.lists); }, sort,
                  [&] { return p.deterministic ? launch_lists(turns_kernel, w.turns) : cudaSuccess; },
                  [&] { return launch_backward_kernels<In, Config>(a, stream); });
}

template <class In, int kHeadDim>
cudaError_t launch_flex_backward_tiles(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = FlexBackwardWorkspace::lay_out(arena, p);
  SortedBackwardArguments a{{backward_arguments(p, w.others), w.lists, w.turns, w.functions}, nullptr};
  const BackwardTasks tasks(p, w.lists);
  // In a deterministic call the order of the turns is the order of the tasks.
  if (!p.deterministic && tasks.groups().are_sorted()) a.sorted_tasks = w.order;
  const auto sort = [&] { return a.sorted_tasks ? launch_task_order(tasks, w.order, stream) : cudaSuccess; };
  return in_order([&] { return simt::launch_store_functions(p, w.functions, stream); },
                  [&] { return launch_listed<In, FlexBackward<In, kHeadDim>>(p, w, a, stream, sort); },
                  [&] {  // a mask function has no gradient
                    const size_t bytes = p.functions->captured_count * sizeof(float);
                    return p.functions->dcaptured ? cudaMemsetAsync(p.functions->dcaptured, 0, bytes, stream)
                                                  : cudaSuccess;
                  });
}

// Three kernels for all calls, packed or not, deterministic or not.
template <class In>
cudaError_t launch_flex_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  switch (backward_head_dims(p).qk) {
    case 64: return launch_flex_backward_tiles<In, 64>(p, workspace, stream);
    case 128: return launch_flex_backward_tiles<In, 128>(p, workspace, stream);
    case 256: return launch_flex_backward_tiles<In, 256>(p, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::cuda::sm90
