// explain(): says which kernels a call would run, why no faster kernels, and how much memory they need.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../../core/params.h"
#include "../cache/kvcache.h"
#include "../flex/flex.h"
#include "../int8/int8.h"
#include "../packed/varlen.h"

namespace flash_attn_ext {

// The choice of a device for one pass, forward or backward.
struct KernelChoice {
  std::string kernel;                // instruction set or tier; empty if no kernel runs
  std::string refusal;               // why the call raises NotImplementedError; empty if it does not
  std::vector<std::string> why_not;  // why each faster kernel does not run
  int64_t workspace_bytes = 0;       // from torch's allocator
};

KernelChoice choose_on_cpu(const AttentionParams& params);
KernelChoice choose_on_cpu(const BackwardParams& params);
KernelChoice choose_on_cpu(const Int8Params& params);
KernelChoice choose_on_cuda(const AttentionParams& params, at::Device device);
KernelChoice choose_on_cuda(const BackwardParams& params, at::Device device);

// Number of pieces of the keys if the CPU's decode kernel runs the forward of this batch or sequence; otherwise 0.
int64_t decode_splits_on_cpu(const AttentionParams& params);
// The reason why the decode kernel does not run.
std::string why_not_decode_on_cpu();

// One part of a call: the whole batch, or one packed sequence.
struct PlanPart {
  Sizes sizes;
  Band band;
  int64_t decode_splits = 0;  // of the CPU's decode kernel; 0: another kernel runs

  int64_t visible_tiles(int64_t block_q, int64_t block_k) const;  // tiles with a score inside the band
};

struct Plan {
  KernelChoice choice;
  std::vector<std::pair<std::string, int64_t>> bytes;  // that the call allocates, by purpose
  bool deterministic = false;                          // the option that the kernels get
  std::vector<PlanPart> parts;
};

// The plan of a forward operator, and of the backward operator after this forward. The checks are the checks of the call.
// Only offsets, lengths and tables are read. No tensor of the size of another input is allocated.
template <class Op>
Plan plan_forward(const typename Op::Tensors& tensors, const typename Op::Options& options);
template <class Op, class Backward>
Plan plan_backward(const typename Op::Tensors& tensors, const typename Op::Options& options,
                   const decltype(Backward::Options::grad_mask)& grad_mask);

Plan plan_int8(const Int8Tensors& tensors, const Int8Options& options);

extern template Plan plan_forward<Attention>(const AttentionTensors&, const AttentionOptions&);
extern template Plan plan_forward<AttentionVarlen>(const VarlenTensors&, const VarlenOptions&);
extern template Plan plan_forward<AttentionCache>(const CacheTensors&, const CacheOptions&);
extern template Plan plan_backward<Attention, AttentionBackward>(const AttentionTensors&,
                                                                 const AttentionOptions&, const GradFlags&);
extern template Plan plan_backward<AttentionVarlen, AttentionVarlenBackward>(const VarlenTensors&,
                                                                             const VarlenOptions&,
                                                                             const GradFlags&);
extern template Plan plan_forward<AttentionFlex>(const FlexTensors&, const FlexOptions&);
extern template Plan plan_forward<AttentionVarlenFlex>(const VarlenFlexTensors&, const VarlenFlexOptions&);
extern template Plan plan_forward<AttentionCacheFlex>(const CacheFlexTensors&, const CacheFlexOptions&);
extern template Plan plan_backward<AttentionFlex, AttentionFlexBackward>(const FlexTensors&,
                                                                         const FlexOptions&,
                                                                         const FlexGradFlags&);
extern template Plan plan_backward<AttentionVarlenFlex, AttentionVarlenFlexBackward>(const VarlenFlexTensors&,
                                                                                     const VarlenFlexOptions&,
                                                                                     const FlexGradFlags&);

}  // namespace flash_attn_ext
