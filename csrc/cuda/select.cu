#include "select.h"

#include <string_view>

#include "device.h"
#include "gpu_code.h"
#include "simt/flex.h"
#include "simt/simt.h"
#include "sm75/sm75.h"
#include "sm80/sm80.h"
#include "sm90/sm90.h"
#include "tiers.h"

namespace flash_attn_ext::cuda {
namespace {

std::string version(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// A tier on tensor cores: its GPUs, and the features that other GPUs lack.
struct Needs {
  const char* tier;
  int first, last;  // compute capabilities
  const char* what;
};
constexpr Needs kNeeds[] = {{"sm90", 90, 90, "wgmma and TMA need 9.0"},
                            {"sm80", 80, 999, "cp.async and mma.sync.m16n8k16 need 8.0"},
                            {"sm75", 75, 79, "its kernels of mma.sync.m16n8k8 are for 7.5"}};

const Needs* needs_of(std::string_view tier) {
  for (const Needs& needs : kNeeds)
    if (tier == needs.tier) return &needs;
  return nullptr;  // simt runs on every GPU
}

// Why a tier cannot run on this GPU; empty if it can. Code of sm80 and sm75 is in the build's code for GPUs of the
// tier, also as PTX.
std::string why_not_here(std::string_view tier, const char* forced, int capability) {
  const bool is_sm90 = tier == "sm90";
  const Needs* const needs = needs_of(tier);
  if (forced && tier != forced) return std::string(forced) + " is forced";
  if (capability == 0) return "the GPU does not tell its compute capability";
  if (needs && (capability < needs->first || capability > needs->last))
    return "this GPU has compute capability " + version(capability) + "; " + needs->what;
  if (is_sm90 ? !has_code_for_9_0a() : !has_code_for(capability, needs ? needs->first : 0))
    return "this build has no code for compute capability " + version(capability) + (is_sm90 ? "a" : "") +
           ", only " + gpu_code();
  return "";
}

template <class Params>
using Workspace = size_t(const Params&);

template <class Params>
size_t no_workspace(const Params&) {
  return 0;
}

// The kernels of a tier for the two dtypes of 16 bits.
template <class Params>
struct HalfKernels {
  Launch<Params>*bfloat16, *float16;
  Workspace<Params>* workspace;
};

// Chooses the first tier that can run the call. Tiers are offered from the fastest to the slowest.
template <class Params>
class Choice {
 public:
  explicit Choice(const Params& params) : params_(params) {}

  // `why_not`: the tier's reason against this call, which starts with its name; null: none. Without a `launch` the tier
  // has no kernel for the dtype.
  void offer(const char* tier, const char* why_not, Launch<Params>* launch, Workspace<Params>* workspace) {
    // On newer GPUs, sm75 is omitted from the list of faster tiers.
    const bool is_old = std::string_view(tier) == "sm75" && capability_ >= 80;
    if (selection_.launch || (is_old && (!forced_ || std::string_view(forced_) != tier))) return;
    std::string reason = why_not_here(tier, forced_, capability_);
    if (!reason.empty()) {
      reason = tier + (": " + reason);
    } else if (why_not) {
      reason = why_not;
    } else if (!launch) {
      reason = std::string(tier) + ": no kernel for query's dtype";
    } else {
      selection_.tier = tier;
      selection_.launch = launch;
      selection_.workspace_bytes = workspace(params_);
      return;
    }
    if (!forced_ || std::string_view(tier) == forced_) refusal_ = reason;
    selection_.why_not.push_back(std::move(reason));
  }

  // As above, for a tier with kernels of 16 bits only.
  void offer(const char* tier, const char* why_not, const HalfKernels<Params>& kernels) {
    offer(tier, why_not, params_.dtype == DType::kFloat16 ? kernels.float16 : kernels.bfloat16,
          kernels.workspace);
  }

  // Returns the choice. If no tier can run the call, it has the reason of the forced tier, or otherwise of simt, the
  // last tier offered.
  Selection<Params> take() {
    if (!selection_.launch)
      selection_.reason = forced_ ? refusal_ + " (" + forced_ + " is forced)" : refusal_;
    return std::move(selection_);
  }

 private:
  const Params& params_;
  const char* const forced_ = forced_tier();
  const int capability_ = compute_capability();
  std::string refusal_;
  Selection<Params> selection_;
};

// simt's launcher for a dtype.
template <class Params>
Launch<Params>* of_dtype(DType dtype, Launch<Params>* float32, Launch<Params>* float64,
                         Launch<Params>* bfloat16, Launch<Params>* float16) {
  switch (dtype) {
    case DType::kFloat32: return float32;
    case DType::kFloat64: return float64;
    case DType::kBFloat16: return bfloat16;
    case DType::kFloat16: return float16;
    case DType::kBool: break;
  }
  return nullptr;
}

// sm75's launcher for a dtype.
template <class Params>
Launch<Params>* of_float16(DType dtype, Launch<Params>* float16) {
  return dtype == DType::kFloat16 ? float16 : nullptr;
}

// Only simt has kernels for the passes of the indexer.
template <class Params>
Selection<Params> select_indexer(const Params& p, Launch<Params>* launch, Workspace<Params>* workspace) {
  Choice<Params> choice(p);
  choice.offer("sm90", "sm90: no indexer", nullptr, nullptr);
  choice.offer("sm80", "sm80: no indexer", nullptr, nullptr);
  choice.offer("sm75", "sm75: no indexer", nullptr, nullptr);
  choice.offer("simt", simt::why_not_indexer(p), launch, workspace);
  return choice.take();
}

}  // namespace

// Each function offers the tiers, one line each, the fastest first.

Selection<AttentionParams> select_forward(const AttentionParams& p) {
  using Half = HalfKernels<AttentionParams>;
  constexpr Half kSm90{sm90::forward_bfloat16, sm90::forward_float16, sm90::forward_workspace};
  constexpr Half kSm90Float8{sm90::forward_float8, sm90::forward_float8, sm90::forward_workspace};
  constexpr Half kSm90Flex{sm90::flex_forward_bfloat16, sm90::flex_forward_float16,
                           sm90::flex_forward_workspace};
  constexpr Half kSm80{sm80::forward_bfloat16, sm80::forward_float16, sm80::forward_workspace};
  constexpr Half kSm80Decode{sm80::decode_bfloat16, sm80::decode_float16, sm80::forward_workspace};
  constexpr Half kSm80Flex{sm80::flex_forward_bfloat16, sm80::flex_forward_float16,
                           sm80::flex_forward_workspace};
  const bool decodes = sm80::is_decode(p), has_float8_products = p.varlen.cache.float8_products;
  Choice<AttentionParams> choice(p);
  const auto offer = [&](const char* tier, const char* why_not, const Half& plain, const Half& flex) {
    choice.offer(tier, why_not, p.functions ? flex : plain);
  };
  offer("sm90", sm90::why_not_forward(p), has_float8_products ? kSm90Float8 : kSm90, kSm90Flex);
  offer("sm80", sm80::why_not_forward(p), decodes ? kSm80Decode : kSm80, kSm80Flex);
  choice.offer("sm75", sm75::why_not_forward(p),
               of_float16(p.dtype, decodes ? sm75::decode_float16 : sm75::forward_float16),
               sm75::forward_workspace);
  if (p.functions)
    choice.offer(
        "simt", simt::why_not_forward(p),
        of_dtype(p.dtype, simt::flex_float32, simt::flex_float64, simt::flex_bfloat16, simt::flex_float16),
        simt::flex_workspace);
  else
    choice.offer("simt", simt::why_not_forward(p),
                 of_dtype(p.dtype, simt::forward_float32, simt::forward_float64, simt::forward_bfloat16,
                          simt::forward_float16),
                 simt::forward_workspace);
  return choice.take();
}

Selection<BackwardParams> select_backward(const BackwardParams& p) {
  using Half = HalfKernels<BackwardParams>;
  constexpr Half kSm90{sm90::backward_bfloat16, sm90::backward_float16, sm90::backward_workspace};
  constexpr Half kSm90Flex{sm90::flex_backward_bfloat16, sm90::flex_backward_float16,
                           sm90::flex_backward_workspace};
  constexpr Half kSm80{sm80::backward_bfloat16, sm80::backward_float16, sm80::backward_workspace};
  constexpr Half kSm80Flex{sm80::flex_backward_bfloat16, sm80::flex_backward_float16,
                           sm80::flex_backward_workspace};
  Choice<BackwardParams> choice(p);
  const auto offer = [&](const char* tier, const char* no_weights, const char* why_not, const Half& plain,
                         const Half& flex) {
    choice.offer(tier, p.dweights && !p.functions ? no_weights : why_not, p.functions ? flex : plain);
  };
  offer("sm90", "sm90: no gradients of the weights", sm90::why_not_backward(p), kSm90, kSm90Flex);
  offer("sm80", "sm80: no gradients of the weights", sm80::why_not_backward(p), kSm80, kSm80Flex);
  choice.offer("sm75", sm75::why_not_backward(p), of_float16(p.dtype, sm75::backward_float16),
               sm75::backward_workspace);
  if (p.functions)
    choice.offer("simt", simt::why_not_functions(p),
                 of_dtype(p.dtype, simt::flex_backward_float32, simt::flex_backward_float64,
                          simt::flex_backward_bfloat16, simt::flex_backward_float16),
                 simt::flex_backward_workspace);
  else
    choice.offer("simt", nullptr,
                 of_dtype(p.dtype, simt::backward_float32, simt::backward_float64, simt::backward_bfloat16,
                          simt::backward_float16),
                 simt::backward_workspace);
  return choice.take();
}

Selection<JvpParams> select_jvp(const JvpParams& p) {
  Choice<JvpParams> choice(p);
  choice.offer("sm90", "sm90: no forward-mode AD", nullptr, nullptr);
  choice.offer("sm80", sm80::why_not_jvp(p),
               {sm80::jvp_bfloat16, sm80::jvp_float16, no_workspace<JvpParams>});
  choice.offer("sm75", "sm75: no forward-mode AD", nullptr, nullptr);
  choice.offer("simt", nullptr,
               of_dtype(p.dtype, simt::jvp_float32, simt::jvp_float64, simt::jvp_bfloat16, simt::jvp_float16),
               no_workspace);
  return choice.take();
}

Selection<DoubleBackwardParams> select_double_backward(const DoubleBackwardParams& p) {
  Choice<DoubleBackwardParams> choice(p);
  choice.offer("sm90", "sm90: no double backward", nullptr, nullptr);
  choice.offer("sm80", "sm80: no double backward", nullptr, nullptr);
  choice.offer("sm75", "sm75: no double backward", nullptr, nullptr);
  choice.offer("simt", nullptr,
               of_dtype(p.dtype, simt::double_backward_float32, simt::double_backward_float64,
                        simt::double_backward_bfloat16, simt::double_backward_float16),
               simt::double_backward_workspace);
  return choice.take();
}

Selection<WeightsParams> select_weights(const WeightsParams& p) {
  Choice<WeightsParams> choice(p);
  choice.offer("sm90", "sm90: no weights", nullptr, nullptr);
  choice.offer("sm80", "sm80: no weights", nullptr, nullptr);
  choice.offer("sm75", "sm75: no weights", nullptr, nullptr);
  choice.offer("simt", nullptr,
               of_dtype(p.dtype, simt::weights_float32, simt::weights_float64, simt::weights_bfloat16,
                        simt::weights_float16),
               simt::weights_workspace);
  return choice.take();
}

Selection<IndexedParams> select_indexed(const IndexedParams& p) {
  Choice<IndexedParams> choice(p);
  choice.offer("sm90", "sm90: no attention by index", nullptr, nullptr);
  choice.offer("sm80", "sm80: no attention by index", nullptr, nullptr);
  choice.offer("sm75", "sm75: no attention by index", nullptr, nullptr);
  choice.offer("simt", simt::why_not_forward(p),
               of_dtype(p.dtype, simt::indexed_float32, simt::indexed_float64, simt::indexed_bfloat16,
                        simt::indexed_float16),
               simt::indexed_workspace);
  return choice.take();
}

Selection<IndexedBackwardParams> select_indexed_backward(const IndexedBackwardParams& p) {
  Choice<IndexedBackwardParams> choice(p);
  choice.offer("sm90", "sm90: no attention by index", nullptr, nullptr);
  choice.offer("sm80", "sm80: no attention by index", nullptr, nullptr);
  choice.offer("sm75", "sm75: no attention by index", nullptr, nullptr);
  choice.offer("simt", nullptr,
               of_dtype(p.dtype, simt::indexed_backward_float32, simt::indexed_backward_float64,
                        simt::indexed_backward_bfloat16, simt::indexed_backward_float16),
               simt::indexed_backward_workspace);
  return choice.take();
}

Selection<IndexerScoresParams> select_indexer_scores(const IndexerScoresParams& p) {
  return select_indexer(p,
                        of_dtype(p.dtype, simt::indexer_scores_float32, simt::indexer_scores_float64,
                                 simt::indexer_scores_bfloat16, simt::indexer_scores_float16),
                        no_workspace);
}

Selection<IndexerScoresBackwardParams> select_indexer_scores_backward(const IndexerScoresBackwardParams& p) {
  return select_indexer(
      p,
      of_dtype(p.dtype, simt::indexer_scores_backward_float32, simt::indexer_scores_backward_float64,
               simt::indexer_scores_backward_bfloat16, simt::indexer_scores_backward_float16),
      simt::indexer_scores_backward_workspace);
}

Selection<IndexerLossParams> select_indexer_loss(const IndexerLossParams& p) {
  return select_indexer(p,
                        of_dtype(p.dtype, simt::indexer_loss_float32, simt::indexer_loss_float64,
                                 simt::indexer_loss_bfloat16, simt::indexer_loss_float16),
                        no_workspace);
}

Selection<IndexerLossBackwardParams> select_indexer_loss_backward(const IndexerLossBackwardParams& p) {
  return select_indexer(
      p,
      of_dtype(p.dtype, simt::indexer_loss_backward_float32, simt::indexer_loss_backward_float64,
               simt::indexer_loss_backward_bfloat16, simt::indexer_loss_backward_float16),
      simt::indexer_loss_backward_workspace);
}

}  // namespace flash_attn_ext::cuda
