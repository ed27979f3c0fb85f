// Forward for Hopper: FlashAttention-2, algorithm 1 (Dao 2023), in the form of FlashAttention-3 (Shah et al. 2024). A
// producer loads and consumers compute. The softmax of a tile overlaps with the product P V of the tile before.
//
//   S = Q K^T    m' = max(m, rowmax S)    P = 2^(S - m')    l = l 2^(m - m') + rowsum P
//   O = (O + P_last V_last) 2^(m - m')    at the end O / l and lse = (m + log2 l) ln 2
//
// A block has 64 query rows for each of its consumer warpgroups. TMA loads Q, K and V. S, P and O are in registers. P
// is the left operand of the second product in the same registers.
#pragma once

#include <type_traits>

#include "../call_of_block.cuh"
#include "../device.h"
#include "../shared_memory.h"
#include "epilogue.cuh"
#include "few_rows.cuh"
#include "forward_range.cuh"
#include "key_mask.cuh"
#include "ping_pong.cuh"
#include "pipeline.cuh"
#include "ptx.h"
#include "schedule.h"
#include "softmax.cuh"
#include "store_out.cuh"
#include "switches.h"

namespace flash_attn_ext::cuda::sm90 {

// The distribution of a multiprocessor's registers.
template <int kConsumers>
struct Registers {
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};
template <>
struct Registers<3> {
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 160;
};

// S = Q K^T has kHeadDim / 16 steps, O has kHeadDimV columns.
template <class In, int kHeadDim_, int kHeadDimV_, Form kForm>
struct Forward {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static_assert(kHeadDimV <= kHeadDim);  // out may use Q's memory
  using Arguments = typename ArgumentsOf<kForm>::Type;
  static constexpr bool kPlain = kForm == Form::kPlain, kPacked = !kPlain, kFewRows = kForm == Form::kFewRows;
  static constexpr bool kFunctions = has_functions(kForm), kScores = kForm == Form::kScores;
  static constexpr HeadDims kDims{kHeadDim, kHeadDimV};
  static constexpr int kRows = kFewRows ? kFewRowsTile : forward_rows(kDims, kForm);
  static constexpr int kKeys = forward_keys(kDims, kForm);
  static constexpr int kConsumers = kRows / kWarpgroupRows;
  static constexpr bool kPersistent = (kPlain || kForm == Form::kOptions) && is_persistent(kDims);
  static constexpr bool kFindsTaskAgain = kPersistent && !kPlain;
  static constexpr bool kStoresByTma = kPlain && FLASH_ATTN_EXT_SM90_TMA_STORE;
  static constexpr bool kTakesTurns = kPlain && takes_turns(kDims);
  // Whether warpgroups see different numbers of tiles, so that each skips tiles that its rows do not see.
  static constexpr bool kSkipsTiles = (kPlain || kForm == Form::kOptions) && kRows != kKeys;
  static_assert(!kSkipsTiles || !kTakesTurns);  // a skipped tile has no turn
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  // If O is long, it is scaled while S = Q K^T runs, not after the exponentials.
  static constexpr bool kScalesUnderScores = kHeadDimV > 128;
  static constexpr int kProducerRegisters = Registers<kConsumers>::kProducerRegisters;
  static constexpr int kConsumerRegisters = Registers<kConsumers>::kConsumerRegisters;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (64 << 10) / kWarpgroup);

  // Of the pipelines. A warpgroup of a persistent block starts its next task while others finish the last one, if there is
  // memory for both tasks' tiles.
  static constexpr int kQueryStages = kPersistent ? 2 : 1, kKeyStages = kPersistent && kHeadDim == 64 ? 4 : 2;

  using QTile = Panels<In, kRows, whole_panels(kHeadDim)>;
  using KTile = Panels<In, kKeys, whole_panels(kHeadDim)>;
  using VTile = Panels<In, kKeys, whole_panels(kHeadDimV)>;

  struct SharedExtra {
    OutBarriers<kConsumers> out;
    PingPong<kConsumers> ping_pong;
  };
  // Persistent blocks store out from a separate buffer, while the next task's Q is loaded. Other blocks reuse Q's
  // memory.
  struct OutTile {
    QTile out;
  };
  struct Shared : std::conditional_t<kPersistent && kStoresByTma, OutTile, NoExtra> {
    Pipeline<KTile, kKeyStages> k;
    Pipeline<VTile, kKeyStages> v;
    Pipeline<QTile, kQueryStages, SharedExtra> q;
  };
  static_assert(sizeof(Shared) <= kMaxHopperSharedBytes);
};

// ---- load: one thread of the producer warpgroup

template <class Tiles>
__device__ void load_next(Tiles& pipeline, uint32_t n, const CUtensorMap& map, int key,
                          const BlockRange& range) {
  const uint32_t stage = pipeline.stage(n);
  ptx::barrier_wait(pipeline.empty[stage],
                    pipeline.parity(n) ^ 1);  // the consumers have read the last tile of this stage
  load_tile(pipeline.tiles[stage], map, range.k_row + key, range.h_kv, range.map_b, pipeline.full[stage]);
}

template <class Config>
__device__ void produce(const typename Config::Arguments& a, const BlockRange& range, const Begun& begun,
                        typename Config::Shared& shared) {
  if constexpr (!Config::kPersistent)
    if (range.tiles == 0) return;  // no consumer waits for Q: it would land in the next block's memory
  const int row = range.q_row + range.first_row;
  const uint32_t stage = shared.q.stage(begun.tasks);
  typename Config::QTile& q = shared.q.tiles[stage];
  ptx::Barrier& q_full = shared.q.full[stage];
  if constexpr (Config::kPersistent)
    ptx::barrier_wait(shared.q.empty[stage],
                      shared.q.parity(begun.tasks) ^ 1);  // the consumers have read the last Q of this stage
  if constexpr (Config::kFewRows) {
    const int in_group = range.rows.first_head - range.h_kv * a.few_rows.group;
    load_group_tile(q, a.q, in_group, row, range.h_kv, range.map_b, q_full);
  } else {
    load_tile(q, a.q, row, range.h, range.map_b, q_full);
  }
  for (int n = 0; n < range.tiles; ++n) {
    const int key = first_key_of<Config>(range, n);
    load_next(shared.k, begun.tiles + n, a.k, key, range);
    load_next(shared.v, begun.tiles + n, a.v, key, range);
  }
}

// ---- compute: a consumer warpgroup, for its 64 rows

// Starts S = Q K^T.
template <class In, class Config, int kElements>
__device__ void start_scores(uint64_t q, uint64_t k, float (&s)[kElements]) {
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 16; ++n)
    ptx::wgmma_shared<In>(s, step_descriptor(q, columns_step<typename Config::QTile>(n)),
                          step_descriptor(k, columns_step<typename Config::KTile>(n)), n > 0);
  ptx::wgmma_commit();  // ends the batch of S
}

// Starts O += P V.
template <class In, class Config, int kSteps, int kElements>
__device__ void start_output(const uint32_t (&weights)[kSteps][4], uint64_t v, float (&o)[kElements]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n) ptx::wgmma_registers<In>(o, weights[n], step_descriptor(v, rows_step(n)));
  ptx::wgmma_commit();  // ends the batch of O
}

template <class In, class Config>
__device__ void consume(const typename Config::Arguments& a, const BlockRange& range, const Begun& begun,
                        typename Config::Shared& shared) {
  constexpr int kKeys = Config::kKeys, kHeadDimV = Config::kHeadDimV;
  const AttentionParams& p = a.p;
  const int warpgroup = ptx::uniform(threadIdx.x / kWarpgroup) - 1, warp = threadIdx.x % kWarpgroup / 32;
  const int first_row = warpgroup * kWarpgroupRows, warp_row = first_row + warp * kWarpRows;  // of the tile
  const ShortBand& band = range.band;
  const ScoreScale& score = a.score;
  const uint32_t q_address =
      ptx::shared_address(&shared.q.tiles) +
      shared.q.stage(begun.tasks) * static_cast<uint32_t>(sizeof(typename Config::QTile)) +
      warpgroup * kWarpgroupRows * kPanelRowBytes;
  const uint64_t q = along_columns(q_address);
  const uint64_t first_k = along_columns(ptx::shared_address(&shared.k.tiles));
  const uint64_t first_v = along_rows<typename Config::VTile>(ptx::shared_address(&shared.v.tiles));

  float s[kKeys / 2], o[kHeadDimV / 2] = {}, factor[2];
  uint32_t weights[kKeys / 16][4];
  RowStatistics statistics;
  // The queries of the thread's two rows; the first query of the warpgroup and their number.
  int query[2], first_query = range.first_row + first_row, queries = kWarpgroupRows;
#pragma unroll
  for (int r = 0; r < 2; ++r) query[r] = range.first_row + warp_row + first_row_in_warp() + 8 * r;
  if constexpr (Config::kFewRows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) query[r] = range.rows.query(warp_row + first_row_in_warp() + 8 * r);
    first_query = range.rows.query(first_row);
    queries >>= range.rows.heads_shift;
  }
  // The keys of tile n that the masks show. Loaded before the products, used after the first product.
  const auto attending = [&](int n) {
    if constexpr (Config::kPlain)
      return ~0u;
    else if constexpr (Config::kFunctions)
      return a.template shown_elements<kKeys, Config::kScores>(range, n, query);
    else
      return a.key_mask.columns(range.b, static_cast<uint32_t>(first_key_of<Config>(range, n)) / kKeys,
                                threadIdx.x);
  };
  const auto softmax = [&](int n, const auto& attends) {
    const int key = first_key_of<Config>(range, n);
    if constexpr (Config::kScores) {
      if (has_softcap(p)) cap(score, s);
      a.change_scores(range, query, key, attends, s);
      statistics.template update<0, true>(static_cast<float>(kLog2E), s, factor);
      return;
    }
    bool shows_all = band.shows_all(first_query, queries, key, kKeys);
    if constexpr (!Config::kPlain) {
      if (has_softcap(p)) cap(score, s);
      const uint32_t shown_in_both = bits_of_row(attends, 0) & bits_of_row(attends, 1);
      shows_all &= __ballot_sync(kAllLanes, shown_in_both != ~0u) == 0;
    }
    if (!shows_all) hide_invisible(band, query, key, s, attends);
    statistics.update(score.scale2, s, factor);
  };

  // With calls of a score function, ptxas no longer knows that all threads of a warp have the same descriptors.
  const auto uniform = [](uint32_t x) {
    return Config::kScores ? static_cast<uint32_t>(ptx::uniform(x)) : x;
  };
  const uint32_t first = begun.tiles;
  const int tiles = tiles_of_warpgroup<Config>(range, first_query);
  if (Config::kPersistent || range.tiles > 0) shared.q.wait(begun.tasks);
  if (tiles > 0) {
    const auto attends = attending(0);
    const uint64_t k = step_descriptor(first_k, shared.k.wait(first));
    ptx::wgmma_fence();  // s may be written: no product uses it
    start_scores<In, Config>(q, k, s);
    ptx::wgmma_wait<0>(s);    // s is complete, K has been read
    shared.k.release(first);  // K may be overwritten
    softmax(0, attends);
    round_weights<In>(s, weights);
  }
  for (int n = 1; n < tiles; ++n) {
    const auto attends = attending(n);
    const uint64_t own_q = along_columns(uniform(q_address));
    const uint64_t k = step_descriptor(first_k, uniform(shared.k.wait(first + n)));
    if constexpr (Config::kTakesTurns) shared.q.extra.ping_pong.wait(warpgroup, begun.turns + n - 1);
    ptx::wgmma_fence();  // publishes weights and o to wgmma; s may be written
    start_scores<In, Config>(own_q, k, s);
    if constexpr (Config::kScalesUnderScores) scale_rows(o, factor);  // while the tensor cores work on s
    const uint64_t v = step_descriptor(first_v, uniform(shared.v.wait(first + n - 1)));
    ptx::wgmma_fence();  // each batch needs one, or ptxas inserts it
    start_output<In, Config>(weights, v, o);
    if constexpr (Config::kTakesTurns) shared.q.extra.ping_pong.pass(warpgroup);
    ptx::wgmma_wait<1>(s);        // s is complete, K has been read
    shared.k.release(first + n);  // K may be overwritten
    if constexpr (!Config::kScores) {
      softmax(n, attends);  // the exponentials overlap with the product O
      ptx::compute_before_wait(statistics.sum[0] + statistics.sum[1], q_address);
    }
    ptx::wgmma_wait<0>(o);            // o is complete, weights and V have been read
    shared.v.release(first + n - 1);  // V may be overwritten
    if constexpr (Config::kScores)
      softmax(n, attends);  // no product runs: the function's call would serialise it
    if constexpr (!Config::kScalesUnderScores) scale_rows(o, factor);
    round_weights<In>(s, weights);
  }
  if constexpr (Config::kPersistent) shared.q.release(begun.tasks);  // Q may be overwritten
  if (tiles > 0) {
    if constexpr (Config::kScalesUnderScores) scale_rows(o, factor);
    const uint32_t last = first + tiles - 1;
    const uint64_t v = step_descriptor(first_v, shared.v.wait(last));
    ptx::wgmma_fence();  // publishes weights and o to wgmma
    start_output<In, Config>(weights, v, o);
    ptx::wgmma_wait<0>(o);   // o is complete, V has been read
    shared.v.release(last);  // V may be overwritten
  }
  // The tiles that only other warpgroups compute. A release before a tile has landed would count for the last tile of its
  // stage.
  if constexpr (Config::kSkipsTiles)
#pragma unroll 1
    for (int n = tiles; n < range.tiles; ++n) {
      shared.k.wait(first + n);
      shared.k.release(first + n);  // K may be overwritten
      shared.v.wait(first + n);
      shared.v.release(first + n);  // V may be overwritten
    }
  // Finds the task and the params of a packed sequence again, because the loop has too few registers to keep them.
  Task task{range.b, range.h, range.h_kv, 0};
  int task_row = range.first_row;
  if constexpr (Config::kFindsTaskAgain) {
    task = task_of(a.schedule, task_of_round<Config>(a, static_cast<int>(begun.tasks)));
    task_row = task.row_block * Config::kRows;
  }
  const auto& call = call_of_block<Config>(p, task.b);
  if constexpr (Config::kFewRows) {
    const FewRowsBlock block{range.b, range.h_kv, keys_of<Config>(range), static_cast<int>(blockIdx.z)};
    const TileRows rows = range.rows.from(warp_row);
    if (a.few_rows.splits == 1)
      finish_tile_rows<In, kHeadDimV>(call, block, rows, score.scale, statistics, o);
    else
      store_partials<In, kHeadDimV>(call, block, rows, score.scale, statistics, a.partials, o);
  } else {
    const int row = task_row + warp_row;
    const float to_score = Config::kScores ? 1.0f : score.scale;
    const bool is_finite = finish_rows(call, task.b, task.h, row, to_score, statistics, o);
    shared.q.extra.out.remember(is_finite);
    if constexpr (Config::kStoresByTma)
      hand_over_out<In, Config>(begun.tasks, warpgroup, warp_row, o, shared);
    else
      store_rows<In>(call.out, task.b, task.h, row, call.sizes.seqlen_q,
                     static_cast<int>(call.sizes.head_dim_v), o);
  }
}

// Repairs the rows of a task that hold a NaN.
template <class In, class Config>
__device__ void repair_task(const typename Config::Arguments& a, const BlockRange& range) {
  constexpr int kHeadDim = Config::kHeadDim;
  const auto& call = call_of_block<Config>(a.p, range.b);
  const int warpgroup = threadIdx.x / kWarpgroup - 1, warp = threadIdx.x % kWarpgroup / 32;
  const int64_t row = range.first_row + warpgroup * kWarpgroupRows + warp * kWarpRows;
  repair_finished_rows<In, kHeadDim>(call, range.b, range.h, row, keys_of<Config>(range),
                                     stored_rows_with_nan<In, kHeadDim>(call, range.b, range.h, row),
                                     a.hidden());
}

template <class In, int kHeadDim, int kHeadDimV, Form kForm,
          class Config = Forward<In, kHeadDim, kHeadDimV, kForm>>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ typename Config::Arguments a) {
#if defined(FA_HAS_HOPPER)
  auto& shared = shared_memory<typename Config::Shared, kMaxHopperSharedBytes>();
  int consumers = Config::kConsumers;
  if constexpr (Config::kFewRows) {
    consumers = block_range<Config>(a, blockIdx.x).consumers;
    if (consumers == 0) return;  // the sequence ends before these rows
  }
  if (threadIdx.x == 0) {
    shared.q.init(consumers * 4);
    shared.k.init(consumers * 4);
    shared.v.init(consumers * 4);
    shared.q.extra.out.init(consumers * kWarpgroup);
    shared.q.extra.ping_pong.init();
    ptx::barrier_init_fence();  // publishes the barriers to TMA
  }
  __syncthreads();  // publishes the barriers to all threads
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0)
      for_each_task<Config>(
          a, [&](const BlockRange& range, const Begun& begun) { produce<Config>(a, range, begun, shared); });
    if constexpr (Config::kStoresByTma)
      if (threadIdx.x == 32) {
        for_each_task<Config>(a, [&](const BlockRange& range, const Begun& begun) {
          store_out<Config>(a.out, a.p, range, begun.tasks, shared);
        });
        tell_that_out_is_stored<Config>(shared);
      }
  } else if (static_cast<int>(threadIdx.x) < (1 + consumers) * kWarpgroup) {
    ptx::claim_registers<Config::kConsumerRegisters>();
    for_each_task<Config>(a, [&](const BlockRange& range, const Begun& begun) {
      consume<In, Config>(a, range, begun, shared);
    });
    if constexpr (!Config::kFewRows) {
      // After all tasks: branches between them would keep the loop's descriptors out of the uniform registers.
      __syncwarp();  // publishes the lanes' flags of NaN rows to the warp
      if (shared.q.extra.out.is_finite()) return;
      if constexpr (Config::kStoresByTma)
        ptx::barrier_wait(shared.q.extra.out.stored, 0);  // out is in global memory
      for_each_task<Config>(
          a, [&](const BlockRange& range, const Begun&) { repair_task<In, Config>(a, range); });
    }
  }
#else
  __trap();  // this build has no code for compute capability 9.0a: an error, not an empty result
#endif
}

}  // namespace flash_attn_ext::cuda::sm90
