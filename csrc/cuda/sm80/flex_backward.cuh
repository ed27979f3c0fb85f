// Backward with functions of the user and block masks: the kernels of backward.cuh, on the tiles that the block mask
// shows.
//
// The gradients of captured tensors need two passes (../simt/captured.cuh). The first pass also computes dq, dk and dv.
// The second pass is the same kernel without these results.
#pragma once

#include "flex_functions.cuh"
#include "flex_schedule.h"
#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Three kernels for all calls, packed or not. simt's kernels first compute the row terms. Last, they compute the
// gradients of mask, slopes and sink, with programs that add to no captured element.
template <class In>
cudaError_t launch_flex_backward(const BackwardParams& p, void* workspace, cudaStream_t stream,
                                 simt::FlexBackwardStep* row_terms, simt::FlexBackwardStep* gradients) {
  Arena arena(workspace);
  const auto w = FlexBackwardWorkspace::lay_out(arena, p);
  const WithFunctions functions{w.simt.functions};
  BackwardParams others = p;
  others.dq = others.dk = others.dv = {};
  auto without_captured = w.simt;
  without_captured.captured = {};
  const auto on_tensor_cores = [&](const BackwardParams& p) {
    constexpr auto kForm = BackwardForm::kOptions;
    const FunctionsWith<ScoreFunction::kNone> mask{w.simt.functions};
    const FunctionsWith<ScoreFunction::kOne> score{w.simt.functions};
    const int padded = flex_padded_head_dim(p);
    if (padded == 64) return launch_padded<BackwardConfig<In, 64, kForm>>(p, w.tier, stream, mask);
    if (p.functions->score) return launch_padded<BackwardConfig<In, 192, kForm>>(p, w.tier, stream, score);
    return padded == 192 ? launch_padded<BackwardConfig<In, 192, kForm>>(p, w.tier, stream, mask)
                         : launch_padded<BackwardConfig<In, 256, kForm>>(p, w.tier, stream, mask);
  };
  const auto qkv_pass = [&] {
    return in_order([&] { return cudaMemsetAsync(w.tier.ticket, 0, w.tier.zeroed_bytes, stream); },
                    [&] { return on_tensor_cores(p); },
                    [&] { return launch_repair<In, Ampere>(p, w.tier, stream, functions); });
  };
  const auto captured_pass = [&] {
    simt::CapturedSums adds = w.simt.captured;
    adds.pass = simt::CapturedSums::kAdd;
    return in_order([&] { return simt::launch_store_functions(p, w.simt.functions, stream, adds); },
                    [&] { return on_tensor_cores(others); },
                    [&] { return simt::launch_store_captured<float>(adds, *p.functions, stream); },
                    [&] { return simt::launch_store_functions(p, w.simt.functions, stream); });
  };
  const bool has_captured = w.simt.captured && p.functions->score;
  const auto clear = [&] {
    const int64_t count = p.functions->captured_count;
    if (has_captured) return simt::launch_clear_captured(w.simt.captured, count, stream);
    // A mask function has no gradient.
    return w.simt.captured ? cudaMemsetAsync(p.functions->dcaptured, 0, count * sizeof(float), stream)
                           : cudaSuccess;
  };
  return in_order([&] { return row_terms(p, w.simt, stream); }, clear,
                  [&] { return p.dq || p.dk || p.dv || has_captured ? qkv_pass() : cudaSuccess; },
                  [&] { return has_captured ? captured_pass() : cudaSuccess; },
                  [&] { return gradients(others, without_captured, stream); });
}

}  // namespace flash_attn_ext::cuda::sm80
