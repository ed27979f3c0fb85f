// The tasks of the forward's blocks.
#pragma once

#include <cuda.h>

#include "../call_of_block.cuh"
#include "../shown_tiles.cuh"
#include "band.h"
#include "few_rows.cuh"
#include "key_mask.h"
#include "nan_rows.cuh"
#include "schedule.h"
#include "sequence_rows.h"
#include "softmax.cuh"
#include "sorted_rounds.h"
#include "task_rounds.h"

namespace flash_attn_ext::cuda::sm90 {

struct ForwardArguments {
  CUtensorMap q, k, v, out;  // out: used if out is stored by TMA
  AttentionParams p;
  ForwardSchedule schedule;
  TaskRounds rounds;       // of persistent blocks, if the host knows the lengths of the tasks
  SortedRounds sorted;     // of persistent blocks, if the host does not
  SequenceRows sequences;  // of persistent blocks, with options
  ScoreScale score;
  ShortBand band;  // of plain calls: their sequences have the same band
  KeyMask key_mask;
  FewRows few_rows;
  Partials<float> partials;

  __device__ HiddenByKeyMask hidden() const { return {}; }
};

// The arguments of the kernels of a form. flex_forward.cuh has the arguments of kFunctions.
template <Form>
struct ArgumentsOf {
  using Type = ForwardArguments;
};

// A task: the rows of a block, and the key tiles that they see.
struct BlockRange {
  int b, h, h_kv, first_row, first_key, tiles;
  int consumers;  // warpgroups that have rows
  ShortBand band;
  const int32_t* list;      // its tiles, with functions (tile_lists.h); without them first_key counts
  int q_row, k_row, map_b;  // the first rows of its sequence in the tensor maps
  TileRows rows;            // used for few rows; first_row is then the first query
};

// The call of a sequence: its sizes, its first rows and its band. Persistent blocks need it without branches.
template <class Config>
__device__ decltype(auto) sizes_of_block(const typename Config::Arguments& a, int b) {
  if constexpr (Config::kPersistent && Config::kPacked)
    return a.sequences.sizes_of(a.p, b);
  else
    return call_of_block<Config>(a.p, b);
}

template <class Config>
__device__ BlockRange block_range(const typename Config::Arguments& a, int number) {
  const Task task = task_of(a.schedule, number);
  const AttentionParams& p = sizes_of_block<Config>(a, task.b);
  const Sizes& z = p.sizes;
  BlockRange range;
  range.b = task.b;
  range.h = task.h;
  range.h_kv = task.h_kv;
  const int queries = Config::kFewRows ? a.few_rows.tile_queries() : Config::kRows;
  range.first_row = task.row_block * queries;
  range.consumers = Config::kConsumers;
  if constexpr (Config::kPlain)
    range.band = a.band;
  else
    range.band = ShortBand(p);
  Range seen = range.band.keys_of_rows(range.first_row, range.first_row + queries);
  range.q_row = range.k_row = 0;
  range.map_b = range.b;
  if constexpr (!Config::kPlain) {
    if (p.varlen) {
      range.q_row = static_cast<int>(p.varlen.first_q);
      range.k_row = static_cast<int>(p.varlen.first_k);
      range.map_b = 0;
    }
    if (range.first_row >= z.seqlen_q) seen.end = 0;  // the sequence ends before these rows
    if constexpr (Config::kFunctions) {
      range.list = a.lists.list(task.b, task.h, task.row_block);
      range.tiles = range.list[0];
      return range;
    }
    seen = a.key_mask.shown_keys(seen, task.b, z.seqlen_k, Config::kKeys);
  }
  range.first_key = seen.begin / Config::kKeys * Config::kKeys;
  range.tiles = tiles_of_keys(seen, Config::kKeys);
  if constexpr (Config::kFewRows) {
    const FewRows& few = a.few_rows;
    range.rows = tile_rows(few, z, task.h_kv, task.h, range.first_row);
    const int left = smaller(static_cast<int>(z.seqlen_q) - range.first_row, queries) << few.heads_shift;
    range.consumers = ceil_div(larger(left, 0), kWarpgroupRows);
    const Range own = tiles_of_split(few, range.tiles, blockIdx.z);
    range.first_key += own.begin * Config::kKeys;
    range.tiles = own.end - own.begin;
  }
  return range;
}

// The numbers of tasks, tiles of keys and turns of ping-pong that a block has begun before its current task. They number
// the stages of the pipelines, which continue over tasks. The first tile of a task has no turn.
struct Begun {
  uint32_t tasks = 0, tiles = 0, turns = 0;

  __device__ void add(const BlockRange& range) {
    tiles += range.tiles;
    turns += max(range.tiles - 1, 0);
  }
};

// The task of a persistent block in a round. The host or the GPU has made the rounds.
template <class Config>
__device__ int task_of_round(const ForwardArguments& a, int round) {
  const int blocks = gridDim.x, block = blockIdx.x, first = round * blocks;
  if constexpr (Config::kPlain) return first + a.rounds.slot(round, block);
  const int sorted = a.sorted.numbers[a.sorted ? first + block : 0];  // always a load: sequence_rows.h
  const int slot =
      blocks < a.schedule.tasks ? a.rounds.slot(round, block) : block;  // of one round: not in `rounds`
  return a.sorted ? sorted : first + slot;
}

// Calls work(range, begun) for each task of the block. A persistent block has one task in each round. ptxas keeps
// descriptors in uniform registers only if it knows that all threads of a warp have the same task. ptxas knows this for
// values that depend on blockIdx, kernel arguments and loop counters, also for loads of words from addresses that depend
// on these alone. It does not know this for loads of bytes, for shuffles, for values from the round before, and after
// branches, even if they depend on a kernel argument alone. So a conditional expression here must not become a branch.
template <class Config, class Work>
__device__ void for_each_task(const typename Config::Arguments& a, const Work& work) {
  Begun begun;
  if constexpr (Config::kPersistent) {
    const int rounds = a.sorted ? *a.sorted.count : a.rounds.count,
              tasks = static_cast<int>(a.schedule.tasks);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int task = task_of_round<Config>(a, round);
      if (task >= tasks) return;  // the last round has fewer tasks than there are blocks
      const BlockRange range = block_range<Config>(a, task);
      begun.tasks = round;
      work(range, begun);
      begun.add(range);
    }
  } else if constexpr (Config::kFunctions) {
    work(block_range<Config>(a, a.task_of_block()), begun);
  } else {
    work(block_range<Config>(a, blockIdx.x), begun);
  }
}

// The number of the block's tiles that a warpgroup computes: up to the last key that its rows see. `first_query`: of its
// rows. ptxas keeps descriptors in uniform registers, because it knows that all lanes have the same ballot.
template <class Config>
__device__ int tiles_of_warpgroup(const BlockRange& range, int first_query) {
  if constexpr (!Config::kSkipsTiles) return range.tiles;
  const ShortBand& band = range.band;
  const int end = band.keys_of_rows(first_query, first_query + kWarpgroupRows).end;
  const int keys = first_query < band.seqlen_q ? end - range.first_key : 0;
  const int own = (max(keys, 0) + Config::kKeys - 1) / Config::kKeys;
  const int lane = threadIdx.x % 32;
  return range.tiles - __popc(__ballot_sync(kAllLanes, lane < range.tiles - own));
}

// The first key of tile n.
template <class Config>
__device__ int first_key_of(const BlockRange& range, int n) {
  if constexpr (Config::kFunctions)
    return ListedTile(range.list[1 + n]).number * Config::kKeys;
  else
    return range.first_key + n * Config::kKeys;
}

template <class Config>
__device__ Range keys_of(const BlockRange& range) {
  if constexpr (Config::kFunctions)
    return {first_key_of<Config>(range, 0), first_key_of<Config>(range, range.tiles - 1) + Config::kKeys};
  return {range.first_key, int64_t{range.first_key} + range.tiles * Config::kKeys};
}

}  // namespace flash_attn_ext::cuda::sm90
