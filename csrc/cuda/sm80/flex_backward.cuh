// Backward with mask functions and block masks: the kernels of backward.cuh, on the tiles that the block mask shows.
#pragma once

#include "flex_functions.cuh"
#include "flex_schedule.h"
#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Three kernels for all calls, packed or not. simt's kernels first compute the row terms. Last, they compute the
// gradients of mask, slopes and sink.
template <class In>
cudaError_t launch_flex_backward(const BackwardParams& p, void* workspace, cudaStream_t stream,
                                 simt::FlexBackwardStep* row_terms, simt::FlexBackwardStep* gradients) {
  Arena arena(workspace);
  const auto w = FlexBackwardWorkspace::lay_out(arena, p);
  const WithFunctions functions{w.simt.functions};
  BackwardParams others = p;
  others.dq = others.dk = others.dv = {};
  const auto on_tensor_cores = [&] {
    constexpr auto kForm = BackwardForm::kPacked;
    const int padded = flex_padded_head_dim(p.sizes);
    if (padded == 64) return launch_padded<BackwardConfig<In, 64, kForm>>(p, w.tier, stream, functions);
    if (padded == 192) return launch_padded<BackwardConfig<In, 192, kForm>>(p, w.tier, stream, functions);
    return launch_padded<BackwardConfig<In, 256, kForm>>(p, w.tier, stream, functions);
  };
  const auto qkv_pass = [&] {
    return in_order([&] { return cudaMemsetAsync(w.tier.ticket, 0, w.tier.zeroed_bytes, stream); },
                    on_tensor_cores, [&] { return launch_repair<In, Ampere>(p, w.tier, stream, functions); });
  };
  return in_order([&] { return row_terms(p, w.simt, stream); },
                  [&] { return p.dq || p.dk || p.dv ? qkv_pass() : cudaSuccess; },
                  [&] { return gradients(others, w.simt, stream); });
}

}  // namespace flash_attn_ext::cuda::sm80
