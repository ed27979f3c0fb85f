#include "../combine.h"
#include "plan.h"
#include "simt.h"

namespace flash_attn_ext::cuda::simt {

size_t forward_workspace(const AttentionParams& p) {
  const ForwardPlan plan = plan_forward(p);
  return plan.splits == 1 ? 0 : accumulator_bytes(p) * Partials<char>::elements(p, plan.splits);
}

size_t backward_workspace(const BackwardParams& p) { return accumulator_bytes(p) * backward_elements(p); }

}  // namespace flash_attn_ext::cuda::simt
