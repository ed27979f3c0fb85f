#include "../combine.h"
#include "flex.h"
#include "functions.h"
#include "indexer_workspace.h"
#include "key_lists.h"
#include "schedule.h"
#include "simt.h"

namespace flash_attn_ext::cuda::simt {
namespace {

int64_t accumulator_bytes(const AttentionParams& p) { return p.dtype == DType::kFloat64 ? 8 : 4; }

// The bytes of the workspace that Workspace<T>::lay_out(arena, p) lays out.
template <template <class T> class Workspace, class Params>
size_t bytes_of_plan(const Params& p) {
  Arena arena(nullptr);
  if (p.dtype == DType::kFloat64)
    Workspace<double>::lay_out(arena, p);
  else
    Workspace<float>::lay_out(arena, p);
  return arena.used();
}

}  // namespace

size_t forward_workspace(const AttentionParams& p) {
  const ForwardSchedule schedule = schedule_forward(p);
  return schedule.splits == 1 ? 0 : accumulator_bytes(p) * Partials<char>::elements(p, schedule.splits);
}

size_t backward_workspace(const BackwardParams& p) { return bytes_of_plan<BackwardWorkspace>(p); }

size_t flex_workspace(const AttentionParams&) { return sizeof(DeviceFunctions); }

size_t flex_backward_workspace(const BackwardParams& p) { return bytes_of_plan<FlexBackwardWorkspace>(p); }

size_t double_backward_workspace(const DoubleBackwardParams& p) {
  return bytes_of_plan<DoubleBackwardWorkspace>(p);
}

size_t weights_workspace(const WeightsParams& p) { return bytes_of_plan<BackwardWorkspace>(p); }

size_t indexed_workspace(const IndexedParams& p) {
  Arena arena(nullptr);
  KeyLists::lay_out(arena, p.sizes, p.indices);
  return arena.used();
}

size_t indexed_backward_workspace(const IndexedBackwardParams& p) {
  return bytes_of_plan<IndexedBackwardWorkspace>(p);
}

size_t indexer_scores_backward_workspace(const IndexerScoresBackwardParams& p) {
  return bytes_of_plan<IndexerBackwardWorkspace>(p);
}

size_t indexer_loss_backward_workspace(const IndexerLossBackwardParams& p) {
  return bytes_of_plan<IndexerBackwardWorkspace>(p);
}

}  // namespace flash_attn_ext::cuda::simt
