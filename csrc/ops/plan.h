// What a call would do, without doing it: which kernels run, why no faster ones, what memory they take.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../core/params.h"
#include "ops.h"

namespace flash_attn_ext {

// A device's answer for one pass.
struct KernelChoice {
  std::string kernel;                // the instruction set or the tier; empty if no kernel runs
  std::string refusal;               // why the call raises NotImplementedError; empty if it does not
  std::vector<std::string> why_not;  // why each faster kernel does not run
  int64_t decode_splits = 0;         // pieces of the keys, where the CPU's decode kernel runs
  int64_t workspace_bytes = 0;       // of torch's allocator
};

KernelChoice choose_on_cpu(const AttentionParams& params);
KernelChoice choose_on_cpu(const BackwardParams& params);
KernelChoice choose_on_cuda(const AttentionParams& params, at::Device device);
KernelChoice choose_on_cuda(const BackwardParams& params, at::Device device);

struct Plan {
  KernelChoice choice;
  std::vector<std::pair<std::string, int64_t>> bytes;  // that the call allocates, by what they are for
  bool deterministic = false;                          // what the kernels are asked for
  Sizes sizes;
  Band band;

  int64_t visible_tiles(int64_t block_q, int64_t block_k) const;  // those with a score inside the band
};

// Checked as the call itself is. Nothing is computed; inputs are not read, and nothing of their size is
// allocated.
Plan plan_attention(const AttentionTensors& tensors, const AttentionOptions& options);
Plan plan_attention_backward(const AttentionTensors& tensors, const AttentionOptions& options,
                             const GradFlags& grad_mask);

}  // namespace flash_attn_ext
