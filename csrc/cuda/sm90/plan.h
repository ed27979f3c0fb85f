// How the forward is cut into blocks, and in which order they run.
#pragma once

#include "../../core/params.h"

namespace flash_attn_ext::cuda::sm90 {

// The longest sequence: the sum of two lengths, each rounded up to whole tiles, fits in 32 bits.
constexpr int64_t kMaxLength = (int64_t{1} << 30) - 1024;

struct ForwardPlan {
  int64_t row_blocks;       // of a head
  int64_t heads_per_group;  // heads, counted through all batches, whose keys and values lie in L2 together
  int64_t heads;            // of all batches
};

struct Task {
  int64_t head, row_block;
};

inline ForwardPlan plan_forward(const Sizes& z, int64_t block_rows) {
  constexpr int64_t kL2Bytes = int64_t{24} << 20;  // about half of Hopper's, which has two halves
  const int64_t bytes_of_head = 2 * 2 * z.seqlen_k * z.head_dim;
  const int64_t kv_heads = kL2Bytes / bytes_of_head > 1 ? kL2Bytes / bytes_of_head : 1;
  return {(z.seqlen_q + block_rows - 1) / block_rows, kv_heads * (z.heads / z.heads_kv), z.batch * z.heads};
}

// Group after group; in a group the last rows of all heads first, because causal makes them the longest.
FA_HOST_DEVICE inline Task task_of(const ForwardPlan& plan, int64_t block) {
  const int64_t first_head = block / (plan.heads_per_group * plan.row_blocks) * plan.heads_per_group;
  const int64_t rest = block - first_head * plan.row_blocks, left = plan.heads - first_head;
  const int64_t heads = left < plan.heads_per_group ? left : plan.heads_per_group;
  return {first_head + rest % heads, plan.row_blocks - 1 - rest / heads};
}

}  // namespace flash_attn_ext::cuda::sm90
