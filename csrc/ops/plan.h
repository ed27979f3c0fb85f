// What a call would do, without doing it: which kernels run, why no faster ones, what memory they take.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../core/params.h"
#include "append.h"
#include "kvcache.h"
#include "ops.h"
#include "varlen.h"

namespace flash_attn_ext {

// A device's answer for one pass.
struct KernelChoice {
  std::string kernel;                // the instruction set or the tier; empty if no kernel runs
  std::string refusal;               // why the call raises NotImplementedError; empty if it does not
  std::vector<std::string> why_not;  // why each faster kernel does not run
  int64_t workspace_bytes = 0;       // of torch's allocator
};

KernelChoice choose_on_cpu(const AttentionParams& params);
KernelChoice choose_on_cpu(const BackwardParams& params);
KernelChoice choose_on_cuda(const AttentionParams& params, at::Device device);
KernelChoice choose_on_cuda(const BackwardParams& params, at::Device device);

// Pieces of the keys, where the CPU's decode kernel runs the forward of this batch or sequence; otherwise 0.
int64_t decode_splits_on_cpu(const AttentionParams& params);
// Why it does not.
std::string why_not_decode_on_cpu();

// Attention that is computed in one piece: of the whole batch, or of one packed sequence.
struct PlanPart {
  Sizes sizes;
  Band band;
  int64_t decode_splits = 0;  // of the CPU's decode kernel; 0: another one runs

  int64_t visible_tiles(int64_t block_q, int64_t block_k) const;  // those with a score inside the band
};

struct Plan {
  KernelChoice choice;
  std::vector<std::pair<std::string, int64_t>> bytes;  // that the call allocates, by what they are for
  bool deterministic = false;                          // what the kernels are asked for
  std::vector<PlanPart> parts;
};

// Checked as the call itself is. Nothing is computed; of the inputs only offsets, lengths and tables are read, and
// nothing of the other inputs' size is allocated.
Plan plan_attention(const AttentionTensors& tensors, const AttentionOptions& options);
Plan plan_attention_backward(const AttentionTensors& tensors, const AttentionOptions& options,
                             const GradFlags& grad_mask);
Plan plan_varlen(const VarlenTensors& tensors, const VarlenOptions& options);
Plan plan_varlen_backward(const VarlenTensors& tensors, const VarlenOptions& options,
                          const GradFlags& grad_mask);
Plan plan_cache(const CacheTensors& tensors, const CacheOptions& options);

}  // namespace flash_attn_ext
