// The functions that library.py calls through ctypes. Their arguments are the structs of core/params.h, and library.py
// compares the sizes of the structs.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "capture.h"
#include "cuda/divider.h"
#include "cuda/gpu_code.h"
#include "cuda/select.h"
#include "cuda/sm75/sm75.h"
#include "cuda/sm80/backward_schedule.h"
#include "cuda/sm80/sm80.h"
#include "cuda/sm90/few_rows.h"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/task_order.h"
#include "cuda/sm90/task_rounds.h"
#include "cuda/tiers.h"
#include "fibers.h"
#include "memory.h"

using flash_attn_ext::AttentionParams;
using flash_attn_ext::BackwardParams;
using flash_attn_ext::DoubleBackwardParams;
using flash_attn_ext::DropoutParams;
using flash_attn_ext::IndexedBackwardParams;
using flash_attn_ext::IndexedParams;
using flash_attn_ext::IndexerLossBackwardParams;
using flash_attn_ext::IndexerLossParams;
using flash_attn_ext::IndexerScoresBackwardParams;
using flash_attn_ext::IndexerScoresParams;
using flash_attn_ext::JvpParams;
using flash_attn_ext::Sizes;
using flash_attn_ext::WeightsParams;

namespace {

int left_out = -1;

// Returns the error, or null. The text is valid until the next call.
const char* report(cudaError_t status) {
  static std::string error;
  error = cuda_host::take_error();
  if (error.empty() && status != cudaSuccess) error = "launch error " + std::to_string(status);
  return error.empty() ? nullptr : error.c_str();
}

template <class Params>
const char* run(const flash_attn_ext::cuda::Selection<Params>& selection, const Params& params,
                void* workspace) {
  static std::string reason;
  if (selection.launch) return report(selection.launch(params, workspace, nullptr));
  return (reason = selection.reason).c_str();
}

// Returns the tier and a line for each faster tier with its reason. If no tier runs, returns the reason.
template <class Params>
const char* describe(const flash_attn_ext::cuda::Selection<Params>& selection) {
  static std::string text;
  text = selection.launch ? selection.tier : selection.reason;
  for (const std::string& reason : selection.why_not) text += "\n" + reason;
  return text.c_str();
}

std::string code_of_build = "sm_80,compute_80,sm_90a";

}  // namespace

const char* flash_attn_ext::cuda::gpu_code() { return code_of_build.c_str(); }

extern "C" {

// The size of struct number n of library.py's list CALLS.
size_t params_bytes(int which) {
  const size_t bytes[] = {sizeof(AttentionParams),
                          sizeof(BackwardParams),
                          sizeof(JvpParams),
                          sizeof(DoubleBackwardParams),
                          sizeof(WeightsParams),
                          sizeof(IndexedParams),
                          sizeof(IndexedBackwardParams),
                          sizeof(IndexerScoresParams),
                          sizeof(IndexerScoresBackwardParams),
                          sizeof(IndexerLossParams),
                          sizeof(IndexerLossBackwardParams)};
  return bytes[which];
}

// For mutations_sm90.py, which puts a condition before some statements and removes one of them in each run.
void leave_out(int number) { left_out = number; }
bool statement_stays(int number) { return number != left_out; }

void seed_order(uint64_t seed) { cuda_host::seed_order(seed); }
void forget_buffers() { cuda_host::forget_buffers(); }
void register_buffer(const void* data, int64_t bytes, int64_t element_bytes, const char* name, bool writable,
                     bool initialised) {
  cuda_host::register_buffer(data, bytes, element_bytes, name, writable, initialised);
}

void set_gpu_code(const char* code) { code_of_build = code; }
const char* force_tier(const char* tier) {
  static std::string error;
  try {
    flash_attn_ext::cuda::force_tier(tier);
    return nullptr;
  } catch (const std::invalid_argument& refusal) {
    return (error = refusal.what()).c_str();
  }
}
const char* forward_choice(const AttentionParams* p) {
  return describe(flash_attn_ext::cuda::select_forward(*p));
}
const char* backward_choice(const BackwardParams* p) {
  return describe(flash_attn_ext::cuda::select_backward(*p));
}

size_t forward_workspace(const AttentionParams* p) {
  return flash_attn_ext::cuda::select_forward(*p).workspace_bytes;
}
const char* forward(const AttentionParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_forward(*p), *p, workspace);
}

const char* why_not_sm90_forward(const AttentionParams* p) {
  return flash_attn_ext::cuda::sm90::why_not_forward(*p);
}
// The decisions of the sm90 forward for a call: its kernel, the heads that share a tile, the splits of the keys.
void sm90_forward_cut(const AttentionParams* p, int (&cut)[3]) {
  const auto [form, head_dims, few_rows] = flash_attn_ext::cuda::sm90::choose_forward(*p);
  cut[0] = static_cast<int>(form);
  cut[1] = few_rows.tile_heads();
  cut[2] = few_rows.splits;
}
const char* why_not_sm80_forward(const AttentionParams* p) {
  return flash_attn_ext::cuda::sm80::why_not_forward(*p);
}
const char* why_not_sm90_backward(const BackwardParams* p) {
  return flash_attn_ext::cuda::sm90::why_not_backward(*p);
}
const char* last_kernel() {
  static std::string name;
  return (name = cuda_host::last_kernel()).c_str();
}

size_t backward_workspace(const BackwardParams* p) {
  return flash_attn_ext::cuda::select_backward(*p).workspace_bytes;
}
const char* backward(const BackwardParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_backward(*p), *p, workspace);
}

const char* jvp_choice(const JvpParams* p) { return describe(flash_attn_ext::cuda::select_jvp(*p)); }
const char* jvp(const JvpParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_jvp(*p), *p, workspace);
}

const char* double_backward_choice(const DoubleBackwardParams* p) {
  return describe(flash_attn_ext::cuda::select_double_backward(*p));
}
size_t double_backward_workspace(const DoubleBackwardParams* p) {
  return flash_attn_ext::cuda::select_double_backward(*p).workspace_bytes;
}
const char* double_backward(const DoubleBackwardParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_double_backward(*p), *p, workspace);
}

const char* weights_choice(const WeightsParams* p) {
  return describe(flash_attn_ext::cuda::select_weights(*p));
}
size_t weights_workspace(const WeightsParams* p) {
  return flash_attn_ext::cuda::select_weights(*p).workspace_bytes;
}
const char* weights(const WeightsParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_weights(*p), *p, workspace);
}

const char* indexed_choice(const IndexedParams* p) {
  return describe(flash_attn_ext::cuda::select_indexed(*p));
}
size_t indexed_workspace(const IndexedParams* p) {
  return flash_attn_ext::cuda::select_indexed(*p).workspace_bytes;
}
const char* indexed(const IndexedParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_indexed(*p), *p, workspace);
}

const char* indexed_backward_choice(const IndexedBackwardParams* p) {
  return describe(flash_attn_ext::cuda::select_indexed_backward(*p));
}
size_t indexed_backward_workspace(const IndexedBackwardParams* p) {
  return flash_attn_ext::cuda::select_indexed_backward(*p).workspace_bytes;
}
const char* indexed_backward(const IndexedBackwardParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_indexed_backward(*p), *p, workspace);
}

const char* indexer_scores_choice(const IndexerScoresParams* p) {
  return describe(flash_attn_ext::cuda::select_indexer_scores(*p));
}
size_t indexer_scores_workspace(const IndexerScoresParams* p) {
  return flash_attn_ext::cuda::select_indexer_scores(*p).workspace_bytes;
}
const char* indexer_scores(const IndexerScoresParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_indexer_scores(*p), *p, workspace);
}

const char* indexer_scores_backward_choice(const IndexerScoresBackwardParams* p) {
  return describe(flash_attn_ext::cuda::select_indexer_scores_backward(*p));
}
size_t indexer_scores_backward_workspace(const IndexerScoresBackwardParams* p) {
  return flash_attn_ext::cuda::select_indexer_scores_backward(*p).workspace_bytes;
}
const char* indexer_scores_backward(const IndexerScoresBackwardParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_indexer_scores_backward(*p), *p, workspace);
}

const char* indexer_loss_choice(const IndexerLossParams* p) {
  return describe(flash_attn_ext::cuda::select_indexer_loss(*p));
}
size_t indexer_loss_workspace(const IndexerLossParams* p) {
  return flash_attn_ext::cuda::select_indexer_loss(*p).workspace_bytes;
}
const char* indexer_loss(const IndexerLossParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_indexer_loss(*p), *p, workspace);
}

const char* indexer_loss_backward_choice(const IndexerLossBackwardParams* p) {
  return describe(flash_attn_ext::cuda::select_indexer_loss_backward(*p));
}
size_t indexer_loss_backward_workspace(const IndexerLossBackwardParams* p) {
  return flash_attn_ext::cuda::select_indexer_loss_backward(*p).workspace_bytes;
}
const char* indexer_loss_backward(const IndexerLossBackwardParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_indexer_loss_backward(*p), *p, workspace);
}

const char* why_not_sm80_backward(const BackwardParams* p) {
  return flash_attn_ext::cuda::sm80::why_not_backward(*p);
}
// The number of tiles of dq, dk and dv that the sm80 or sm75 backward flagged because they hold a NaN; -1 if another tier
// ran.
int64_t sm80_flagged_tiles(const BackwardParams* p, void* workspace) {
  using namespace flash_attn_ext::cuda;
  const auto ran = select_backward(*p).launch;
  const bool is_sm75 = ran == sm75::backward_float16;
  if (ran != sm80::backward_bfloat16 && ran != sm80::backward_float16 && !is_sm75) return -1;
  const auto& z = p->sizes;
  flash_attn_ext::Arena arena(workspace);
  const auto flags = is_sm75 ? sm80::BackwardWorkspace::lay_out<sm80::Turing>(arena, *p).flags
                             : sm80::BackwardWorkspace::lay_out(arena, *p).flags;
  const int64_t queries = p->dq ? z.batch * z.heads * sm80::NanFlags::tiles(z.seqlen_q) : 0;
  const int64_t keys = p->dk || p->dv ? z.batch * z.heads_kv * sm80::NanFlags::tiles(z.seqlen_k) : 0;
  return std::count(flags.queries, flags.queries + queries, 1) + std::count(flags.keys, flags.keys + keys, 1);
}

// The persistent block and the number of key tiles of each task of a plain call, in the order of tasks. Returns the number
// of tasks. With null arrays it only counts.
int64_t sm90_dealt_tasks(const AttentionParams* p, int blocks, int* block_of, int* tiles) {
  using namespace flash_attn_ext::cuda::sm90;
  const HeadDims dims = choose_forward(*p).head_dims;
  const int rows = forward_rows(dims), keys = forward_keys(dims);
  const ForwardSchedule schedule = schedule_forward(p->sizes, rows);
  if (!block_of) return schedule.tasks;
  const TaskRounds rounds = deal_tasks(*p, rows, keys, blocks);
  for (int64_t first = 0; first < schedule.tasks; first += blocks)
    for (int block = 0; block < blocks; ++block) {
      const int64_t task = first + rounds.slot(static_cast<int>(first / blocks), block);
      if (task < schedule.tasks) block_of[task] = block;
    }
  for (int task = 0; task < schedule.tasks; ++task)
    tiles[task] = tiles_of_row_block(*p, rows, keys, task_of(schedule, task).row_block);
  return schedule.tasks;
}

// The tasks of persistent blocks, made by the kernel of sorted_rounds.h for a packed call: its head, counted over all
// sequences, and its block of rows. [rounds][blocks]; -1: no task. Returns the number of rounds; 0: tasks are not sorted.
int64_t sm90_sorted_tasks(const AttentionParams* p, void* workspace, int* heads, int* row_blocks) {
  using namespace flash_attn_ext::cuda::sm90;
  const ForwardChoice choice = choose_forward(*p);
  const int rows = forward_rows(choice.head_dims), keys = forward_keys(choice.head_dims);
  flash_attn_ext::Arena arena(workspace);
  const SortedRounds rounds = ForwardWorkspace::lay_out(arena, *p, choice).sorted;
  if (!rounds) return 0;
  if (const char* error = report(launch_make_rounds(rounds, *p, {}, rows, keys, nullptr)))
    throw std::runtime_error(error);
  const ForwardSchedule schedule = rounds.schedule(p->sizes, rows);
  for (int64_t n = 0; n < int64_t{*rounds.count} * rounds.blocks; ++n) {
    const Task task = task_of(schedule, rounds.numbers[n]);
    const bool exists = rounds.numbers[n] != SortedRounds::kNoTask;
    heads[n] = exists ? static_cast<int>(task.b * p->sizes.heads) + task.h : -1;
    row_blocks[n] = exists ? task.row_block : -1;
  }
  return *rounds.count;
}

// The order in which the blocks of a forward (a backward) with functions begin, and the number of tiles of each task.
// `words`: [blocks][1 + tiles], the lists of all heads (tile_lists.h).
const char* sm90_task_order(const BackwardParams* p, bool backward, int32_t* words, int blocks, int tiles,
                            int32_t* order, int32_t* tiles_of_task) {
  using namespace flash_attn_ext::cuda::sm90;
  TileLists lists;
  lists.words = words;
  lists.batches = lists.heads = 1;
  lists.blocks = blocks;
  lists.tiles = tiles;
  const auto sorted = [&](const auto& tasks) {
    for (int task = 0; task < tasks.groups().tasks; ++task) tiles_of_task[task] = tasks.length(task);
    return report(launch_task_order(tasks, order, nullptr));
  };
  const flash_attn_ext::UserFunctions functions;
  BackwardParams call = *p;
  call.functions = &functions;
  if (backward) return sorted(BackwardTasks(call, lists));
  const int rows = forward_rows(forward_head_dims(p->sizes, Form::kFunctions), Form::kFunctions);
  return sorted(ForwardTasks{schedule_forward(p->sizes, rows), lists});
}

int quotient(int n, int divisor) { return flash_attn_ext::cuda::Divider(divisor).quotient(n); }

// Runs the captured launches.
const char* replay() { return report(cuda_host::replay()); }

const char* dropout_mask(const DropoutParams* dropout, const Sizes* sizes, int64_t first_row, bool* kept) {
  return report(flash_attn_ext::cuda::launch_dropout_mask(*dropout, *sizes, first_row, kept, nullptr));
}
}
