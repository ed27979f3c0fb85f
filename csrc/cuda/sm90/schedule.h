// How the forward is cut into tasks, and in which order blocks compute them.
#pragma once

#include "../../core/mask.h"
#include "../../core/params.h"
#include "../../core/program.h"
#include "../../core/splits.h"
#include "../divider.h"
#include "switches.h"

namespace flash_attn_ext::cuda::sm90 {

// The longest sequence: two lengths, each rounded up to whole tiles, add up within 32 bits.
constexpr int64_t kMaxLength = (int64_t{1} << 30) - 1024;

// The head dimension of the kernels of few rows. TMA fills the columns after the tensor's with zeros.
FA_HOST_DEVICE constexpr int padded_head_dim(const Sizes& z) {
  const int64_t larger = z.head_dim > z.head_dim_v ? z.head_dim : z.head_dim_v;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 256;
}

// The forward's kernels. kOptions has softcap, key masks and packed sequences, and so have the next two. In kFewRows
// heads share tiles and keys are split (few_rows.h). kFunctions has mask functions and block masks (flex_forward.cuh).
// kScores has functions on scores, too.
enum class Form { kPlain, kOptions, kFewRows, kFunctions, kScores };

// Whether a form has functions of the user.
constexpr bool has_functions(Form form) { return form == Form::kFunctions || form == Form::kScores; }

// Whether the plain kernels run a call: it has neither softcap nor mask nor packed sequences nor functions of the user.
inline bool is_plain(const AttentionParams& p) {
  return !(p.softcap > 0) && !p.mask && !p.varlen && !p.functions;
}

// The head dimensions of a kernel: of query and key, and of value, which is not larger.
struct HeadDims {
  int qk, v;
};

// The head dimensions of the forward's kernel for a call. Calls of few rows mostly wait for K and V, so they use wider
// padding.
constexpr HeadDims forward_head_dims(const Sizes& z, Form form) {
  const int64_t larger = z.head_dim > z.head_dim_v ? z.head_dim : z.head_dim_v;
  const bool has_every_width = form == Form::kPlain || form == Form::kOptions;
  if (FLASH_ATTN_EXT_SM90_WGMMA_N96 && has_every_width && 64 < larger && larger <= 96) return {96, 96};
  if (has_every_width && 128 < larger && larger <= 192) return {192, z.head_dim_v <= 128 ? 128 : 192};
  return {padded_head_dim(z), padded_head_dim(z)};
}

// The head dimensions of the backward's kernel for a call.
constexpr HeadDims backward_head_dims(const Sizes& z, bool plain) {
  const int64_t larger = z.head_dim > z.head_dim_v ? z.head_dim : z.head_dim_v;
  if (FLASH_ATTN_EXT_SM90_WGMMA_N96 && 64 < larger && larger <= 96) return {96, 96};
  if (FLASH_ATTN_EXT_SM90_WGMMA_N32 && 128 < larger && larger <= 192)
    return {192, z.head_dim_v <= 128 ? 128 : 192};
  if (!FLASH_ATTN_EXT_SM90_WGMMA_N32 && larger <= 64 && !plain) return {128, 128};
  return {padded_head_dim(z), padded_head_dim(z)};
}
inline HeadDims backward_head_dims(const AttentionParams& p) {
  if (p.functions) {  // 128 or 256 with a function on scores: score_backward.cuh
    const int padded = padded_head_dim(p.sizes), least = p.functions->score ? 128 : 64;
    return {padded < least ? least : padded, padded < least ? least : padded};
  }
  return backward_head_dims(p.sizes, is_plain(p));
}

// Keys and query rows of the forward's tiles (kFewRows has its own rows). Shared memory and registers limit them. The
// tiles of forms with functions divide a block of 128 x 128, which is the usual size in block masks.
constexpr int forward_keys(HeadDims dims, Form form = Form::kPlain) {
  if (has_functions(form)) return dims.v == 256 ? 64 : 128;
  return dims.v == 256 ? 80 : dims.v == 192 ? 112 : 128;
}
constexpr int forward_rows(HeadDims dims, Form form = Form::kPlain) {
  return dims.qk == 64 && !has_functions(form) ? 192 : 128;
}
// The same of the kernel with float8 products.
constexpr int float8_keys(int head_dim) { return head_dim == 256 ? 96 : 128; }
constexpr int float8_rows(int head_dim) { return head_dim == 64 ? 192 : 128; }

// Whether the plain kernel and the kernel with options of these head dimensions have persistent blocks. Beyond a head
// dimension of 128 their loop has too few registers.
constexpr bool is_persistent(HeadDims dims) { return FLASH_ATTN_EXT_SM90_PERSISTENT && dims.qk <= 128; }

// Whether the consumer warpgroups of the plain kernel alternate (ping_pong.cuh). On an H200, alternating made head
// dimension 64 slower by up to 1.5%, and 128 faster by 1% at 1024 keys. So other kernels do not alternate.
constexpr bool takes_turns(HeadDims dims) {
  return FLASH_ATTN_EXT_SM90_PING_PONG && dims.qk > 64 && dims.qk <= 128;
}

struct ForwardSchedule {
  int64_t tasks;            // a task is one block of rows of one head
  int row_blocks;           // blocks of rows of a head
  int heads_per_group;      // heads, counted over all batches; the keys and values of a group fit in L2
  int full_groups;          // the last group may have fewer heads
  Divider by_group_blocks;  // the tasks of a full group
  Divider by_heads[2];      // the heads of a full group; of the last group
  Divider by_heads_of_batch, by_heads_of_kv_head;
};

struct Task {
  int b, h, h_kv, row_block;
};

constexpr int64_t kL2Bytes = int64_t{24} << 20;  // about half of Hopper's L2, which has two halves

// The number of heads, counted over all batches, with keys and values that fit in L2.
inline int64_t heads_in_l2(const Sizes& z) {
  const int64_t bytes_of_head = 2 * z.seqlen_k * (z.head_dim + z.head_dim_v);
  const int64_t kv_heads = kL2Bytes / bytes_of_head > 1 ? kL2Bytes / bytes_of_head : 1;
  return kv_heads * (z.heads / z.heads_kv);
}

inline ForwardSchedule schedule_forward(const Sizes& z, int64_t block_rows, int64_t group) {
  const int64_t heads = z.batch * z.heads, in_group = group < heads ? group : heads;
  const int64_t row_blocks = ceil_div(z.seqlen_q, block_rows), left = heads % in_group;
  ForwardSchedule schedule;
  schedule.tasks = heads * row_blocks;
  schedule.row_blocks = static_cast<int>(row_blocks);
  schedule.heads_per_group = static_cast<int>(in_group);
  schedule.full_groups = static_cast<int>(heads / in_group);
  schedule.by_group_blocks = Divider(in_group * row_blocks);
  schedule.by_heads[0] = Divider(in_group);
  schedule.by_heads[1] = Divider(left > 0 ? left : in_group);
  schedule.by_heads_of_batch = Divider(z.heads);
  schedule.by_heads_of_kv_head = Divider(z.heads / z.heads_kv);
  return schedule;
}
inline ForwardSchedule schedule_forward(const Sizes& z, int64_t block_rows) {
  return schedule_forward(z, block_rows, heads_in_l2(z));
}

// The keys that the rows of a block see in the band, and the number of their tiles.
FA_HOST_DEVICE inline Range keys_of_rows(const AttentionParams& p, int64_t first_row, int rows) {
  const int64_t end = first_row + rows;
  return visible_keys(p.band.without_chunks(), first_row, end < p.sizes.seqlen_q ? end : p.sizes.seqlen_q,
                      p.sizes.seqlen_k);
}
FA_HOST_DEVICE inline int tiles_of_keys(Range keys, int tile_keys) {
  return keys.begin < keys.end
             ? static_cast<int>(ceil_div(keys.end - keys.begin / tile_keys * tile_keys, tile_keys))
             : 0;
}

// Finds a task by its number. Group after group; in a group the last rows of all heads come first, because causal makes
// them the longest.
FA_HOST_DEVICE inline Task task_of(const ForwardSchedule& schedule, int block) {
  const int group = schedule.by_group_blocks.quotient(block);
  const int in_group = schedule.by_group_blocks.remainder(block);
  const Divider& by_heads = schedule.by_heads[group >= schedule.full_groups];
  const int head = group * schedule.heads_per_group + by_heads.remainder(in_group);
  const int h = schedule.by_heads_of_batch.remainder(head);
  return {schedule.by_heads_of_batch.quotient(head), h, schedule.by_heads_of_kv_head.quotient(h),
          schedule.row_blocks - 1 - by_heads.quotient(in_group)};
}

}  // namespace flash_attn_ext::cuda::sm90
