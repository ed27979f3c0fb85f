// Forward for Hopper: FlashAttention-2, algorithm 1 (Dao 2023), in the form of FlashAttention-3 (Shah et al.
// 2024): a producer loads, consumers compute, and the softmax of a tile runs under the product of the last.
//
//   S = Q K^T    m' = max(m, rowmax S)    P = 2^(S - m')    l = l 2^(m - m') + rowsum P
//   O = (O + P_last V_last) 2^(m - m')    at the end O / l and lse = (m + log2 l) ln 2
//
// A block owns 64 query rows for each of its consumer warpgroups. Q, K and V come by TMA; S and O live in
// registers, and so does P, which is the left operand of the second product as it stands.
#pragma once

#include "../call_of_block.cuh"
#include "../launch.h"
#include "../shared_memory.h"
#include "epilogue.cuh"
#include "few_rows.cuh"
#include "key_mask.cuh"
#include "pipeline.cuh"
#include "plan.h"
#include "ptx.h"
#include "sm90.h"
#include "softmax.cuh"
#include "tensor_map.h"

namespace flash_attn_ext::cuda::sm90 {

// Tile sizes, and how the registers of a multiprocessor are dealt out.
template <int kHeadDim, bool kFewRows>
struct Tiling {
  static constexpr int kConsumers = 2, kProducerRegisters = 24, kConsumerRegisters = 240;
};
template <>
struct Tiling<64, false> {
  static constexpr int kConsumers = 3, kProducerRegisters = 32, kConsumerRegisters = 160;
};

template <class In, int kHeadDim, Form kForm>
struct Forward : Tiling<kHeadDim, kForm == Form::kFewRows> {
  static constexpr bool kPlain = kForm == Form::kPlain, kPacked = !kPlain, kFewRows = kForm == Form::kFewRows;
  using Tiling<kHeadDim, kFewRows>::kConsumers;
  static constexpr int kKeys = forward_keys(kHeadDim);
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static_assert(kRows == (kFewRows ? kFewRowsTile : forward_rows(kHeadDim)));
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  // O is long: its products with the factors of softmax run under S = Q K^T, not behind the exponentials.
  static constexpr bool kScalesUnderScores = kHeadDim > 128;
  static_assert(Forward::kProducerRegisters + kConsumers * Forward::kConsumerRegisters <=
                (64 << 10) / kWarpgroup);

  using QTile = Panels<In, kRows, kHeadDim>;
  using KVTile = Panels<In, kKeys, kHeadDim>;

  struct Shared {
    Pipeline<KVTile> k, v;
    QTile q;
    ptx::Barrier q_full;
  };
  static_assert(sizeof(Shared) <= kMaxHopperSharedBytes);
};

struct ForwardArguments {
  CUtensorMap q, k, v;
  AttentionParams p;
  ForwardPlan plan;
  ScoreScale score;
  KeyMask key_mask;
  FewRows few_rows;
  Partials<float> partials;
};

// What a block computes, and the key tiles that its rows can see.
struct BlockRange {
  int b, h, h_kv, first_row, first_key, tiles;
  int consumers;  // warpgroups that have rows
  ShortBand band;
  int q_row, k_row, map_b;  // where its sequence begins in the tensor maps
  TileRows rows;            // of few; first_row is then the first query
};

template <class Config>
__device__ BlockRange block_range(const ForwardArguments& a) {
  const Task task = task_of(a.plan, blockIdx.x);
  const AttentionParams& p = call_of_block<Config>(a.p, task.b);
  const Sizes& z = p.sizes;
  BlockRange range;
  range.b = task.b;
  range.h = task.h;
  range.h_kv = task.h_kv;
  const int queries = Config::kFewRows ? a.few_rows.tile_queries() : Config::kRows;
  range.first_row = task.row_block * queries;
  range.consumers = Config::kConsumers;
  const int64_t end_row = range.first_row + queries;
  Range seen = visible_keys(p.band, range.first_row, end_row < z.seqlen_q ? end_row : z.seqlen_q, z.seqlen_k);
  range.band = ShortBand(p);
  range.q_row = range.k_row = 0;
  range.map_b = range.b;
  if constexpr (!Config::kPlain) {
    if (p.varlen) {
      range.q_row = static_cast<int>(p.varlen.first_q);
      range.k_row = static_cast<int>(p.varlen.first_k);
      range.map_b = 0;
      if (range.first_row >= z.seqlen_q) seen.end = 0;  // the sequence ends before
    }
    const Range attending = a.key_mask.seen_tiles(task.b, ceil_div(z.seqlen_k, Config::kKeys));
    seen.begin = larger(seen.begin, attending.begin * Config::kKeys);
    seen.end = smaller(seen.end, attending.end * Config::kKeys);
  }
  range.first_key = seen.begin / Config::kKeys * Config::kKeys;
  range.tiles = seen.begin < seen.end ? ceil_div(seen.end - range.first_key, Config::kKeys) : 0;
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

// ---- load: one thread of the producer warpgroup

template <class Tile>
__device__ void load_next(Pipeline<Tile>& pipeline, uint32_t n, const CUtensorMap& map, int key,
                          const BlockRange& range) {
  const uint32_t stage = pipeline.stage(n);
  ptx::barrier_wait(pipeline.empty[stage], pipeline.parity(n) ^ 1);  // the consumers have read tile n - 2
  load_tile(pipeline.tiles[stage], map, range.k_row + key, range.h_kv, range.map_b, pipeline.full[stage]);
}

template <class Config>
__device__ void produce(const ForwardArguments& a, const BlockRange& range, typename Config::Shared& shared) {
  if (range.tiles == 0) return;  // nobody waits for Q: it would land in the next block's memory
  const int row = range.q_row + range.first_row;
  if constexpr (Config::kFewRows) {
    const int in_group = range.rows.first_head - range.h_kv * a.few_rows.group;
    load_group_tile(shared.q, a.q, in_group, row, range.h_kv, range.map_b, shared.q_full);
  } else {
    load_tile(shared.q, a.q, row, range.h, range.map_b, shared.q_full);
  }
  for (int n = 0; n < range.tiles; ++n) {
    const int key = range.first_key + n * Config::kKeys;
    load_next(shared.k, n, a.k, key, range);
    load_next(shared.v, n, a.v, key, range);
  }
}

// ---- compute: a consumer warpgroup, for its 64 rows

// S = Q K^T. Only starts it.
template <class In, class Config, int kHeadDim, int kElements>
__device__ void start_scores(uint64_t q, uint64_t k, float (&s)[kElements]) {
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n)
    ptx::wgmma_shared<In>(s, step_descriptor(q, columns_step<typename Config::QTile>(n)),
                          step_descriptor(k, columns_step<typename Config::KVTile>(n)), n > 0);
  ptx::wgmma_commit();  // S is a batch of its own
}

// O += P V. Only starts it.
template <class In, class Config, int kSteps, int kElements>
__device__ void start_output(const uint32_t (&weights)[kSteps][4], uint64_t v, float (&o)[kElements]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n) ptx::wgmma_registers<In>(o, weights[n], step_descriptor(v, rows_step(n)));
  ptx::wgmma_commit();  // so is O
}

template <class In, int kHeadDim, class Config>
__device__ void consume(const ForwardArguments& a, const BlockRange& range, typename Config::Shared& shared) {
  constexpr int kKeys = Config::kKeys;
  const AttentionParams& p = a.p;
  const int warpgroup = ptx::uniform(threadIdx.x / kWarpgroup) - 1, warp = threadIdx.x % kWarpgroup / 32;
  const int first_row = warpgroup * kWarpgroupRows, warp_row = first_row + warp * kWarpRows;  // of the tile
  const ShortBand& band = range.band;
  const ScoreScale& score = a.score;
  const uint32_t q_address = ptx::shared_address(&shared.q) + warpgroup * kWarpgroupRows * kPanelRowBytes;
  const uint64_t q = along_columns(q_address);
  const uint64_t first_k = along_columns(ptx::shared_address(&shared.k.tiles));
  const uint64_t first_v = along_rows<typename Config::KVTile>(ptx::shared_address(&shared.v.tiles));

  float s[kKeys / 2], o[kHeadDim / 2] = {}, factor[2];
  uint32_t weights[kKeys / 16][4];
  RowStatistics statistics;
  // The queries of the thread's two rows, and those of the warpgroup.
  int query[2], first_query = range.first_row + first_row, queries = kWarpgroupRows;
#pragma unroll
  for (int r = 0; r < 2; ++r) query[r] = range.first_row + warp_row + first_row_in_warp() + 8 * r;
  if constexpr (Config::kFewRows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) query[r] = range.rows.query(warp_row + first_row_in_warp() + 8 * r);
    first_query = range.rows.query(first_row);
    queries >>= range.rows.heads_shift;
  }
  // The keys of tile n that the mask shows: asked for before the products, needed after the first.
  const auto attending = [&](int n) {
    if constexpr (Config::kPlain)
      return ~0u;
    else
      return a.key_mask.columns(range.b, range.first_key / kKeys + n, threadIdx.x);
  };
  const auto softmax = [&](int n, uint32_t attends) {
    const int key = range.first_key + n * kKeys;
    bool shows_all = band.shows_all(first_query, queries, key, kKeys);
    if constexpr (!Config::kPlain) {
      if (p.softcap > 0) cap(score, s);
      shows_all &= __ballot_sync(kAllLanes, attends != ~0u) == 0;
    }
    if (!shows_all) hide_invisible(band, query, key, s, attends);
    statistics.update(score.scale2, s, factor);
  };

  if (range.tiles > 0) {
    const uint32_t attends = attending(0);
    ptx::barrier_wait(shared.q_full, 0);  // TMA has written Q
    const uint64_t k = step_descriptor(first_k, shared.k.wait(0));
    ptx::wgmma_fence();  // s may be written
    start_scores<In, Config, kHeadDim>(q, k, s);
    ptx::wgmma_wait<0>(s);  // s is complete, K has been read
    shared.k.release(0);    // K may be overwritten
    softmax(0, attends);
    round_weights<In>(s, weights);
  }
  for (int n = 1; n < range.tiles; ++n) {
    const uint32_t attends = attending(n);
    const uint64_t k = step_descriptor(first_k, shared.k.wait(n));
    ptx::wgmma_fence();  // s has been read, weights and o are written
    start_scores<In, Config, kHeadDim>(q, k, s);
    if constexpr (Config::kScalesUnderScores) scale_rows(o, factor);  // while the tensor cores work on s
    const uint64_t v = step_descriptor(first_v, shared.v.wait(n - 1));
    ptx::wgmma_fence();  // ptxas wants one before each batch, and would put it in
    start_output<In, Config>(weights, v, o);
    ptx::wgmma_wait<1>(s);  // s is complete, K has been read
    shared.k.release(n);    // K may be overwritten
    softmax(n, attends);    // the exponentials, while the tensor cores work on o
    ptx::compute_before_wait(statistics.sum[0] + statistics.sum[1], q_address);
    ptx::wgmma_wait<0>(o);    // o is complete, weights and V have been read
    shared.v.release(n - 1);  // V may be overwritten
    if constexpr (!Config::kScalesUnderScores) scale_rows(o, factor);
    round_weights<In>(s, weights);
  }
  if (range.tiles > 0) {
    if constexpr (Config::kScalesUnderScores) scale_rows(o, factor);
    const uint64_t v = step_descriptor(first_v, shared.v.wait(range.tiles - 1));
    ptx::wgmma_fence();  // weights and o are written
    start_output<In, Config>(weights, v, o);
    ptx::wgmma_wait<0>(o);  // o is complete
  }
  const Range tiles{range.first_key, int64_t{range.first_key} + range.tiles * kKeys};
  // Of a packed sequence once more: the loop's registers do not hold it.
  const auto& call = call_of_block<Config>(p, range.b);
  if constexpr (Config::kFewRows) {
    const FewRowsBlock block{range.b, range.h_kv, tiles, static_cast<int>(blockIdx.z)};
    const TileRows rows = range.rows.from(warp_row);
    if (a.few_rows.splits == 1)
      finish_tile_rows<In, kHeadDim>(call, block, rows, score.scale, statistics, o);
    else
      store_partials<In, kHeadDim>(call, block, rows, score.scale, statistics, a.partials, o);
  } else {
    finish_rows<In, kHeadDim>(call, range.b, range.h, range.first_row + warp_row, score.scale, tiles,
                              statistics, o);
  }
}

template <class In, int kHeadDim, Form kForm, class Config = Forward<In, kHeadDim, kForm>>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
#if defined(FA_HAS_HOPPER)
  auto& shared = shared_memory<typename Config::Shared, kMaxHopperSharedBytes>();
  const BlockRange range = block_range<Config>(a);
  if (Config::kFewRows && range.consumers == 0) return;  // the sequence ends before
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.q_full, 1);  // the producer
    shared.k.init(range.consumers * 4);
    shared.v.init(range.consumers * 4);
    ptx::barrier_init_fence();  // TMA sees the barriers
  }
  __syncthreads();  // all threads see the barriers
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(a, range, shared);
  } else if (static_cast<int>(threadIdx.x) < (1 + range.consumers) * kWarpgroup) {
    ptx::claim_registers<Config::kConsumerRegisters>();
    consume<In, kHeadDim, Config>(a, range, shared);
  }
#else
  __trap();  // this build has no code for compute capability 9.0a: an error, not an empty result
#endif
}

// ---- launch

template <class In, int kHeadDim, Form kForm>
cudaError_t launch_tiles(const AttentionParams& p, const FewRows& few, void* workspace, cudaStream_t stream) {
  using Config = Forward<In, kHeadDim, kForm>;
  const Sizes& z = p.sizes;
  const ForwardWorkspace memory(workspace, p, few.splits);
  ForwardArguments a{{},
                     {},
                     {},
                     p,
                     Config::kFewRows ? plan_few_rows(z, few) : plan_forward(z, Config::kRows),
                     ScoreScale(p),
                     memory.key_mask,
                     few,
                     memory.partials};
  const LaunchShape shape{a.plan.blocks, 1, few.splits, Config::kThreads, sizeof(typename Config::Shared)};
  const TensorMaps maps(p);
  const auto map_queries = [&] {
    return Config::kFewRows ? maps.of_groups(a.q, p.q, z.head_dim, few.tile_queries(), few.tile_heads())
                            : maps.of_queries(a.q, p.q, z.head_dim, Config::kRows);
  };
  return in_order(
      map_queries,  //
      [&] { return maps.of_keys(a.k, p.k, z.head_dim, Config::kKeys); },
      [&] { return maps.of_keys(a.v, p.v, z.head_dim_v, Config::kKeys); },
      [&] { return launch_key_mask<Config::kKeys>(p, a.key_mask, stream); },
      [&] { return launch(forward_kernel<In, kHeadDim, kForm>, shape, stream, a); },
      [&] { return launch_combine(p, few.splits, workspace, stream); });
}

template <class In, int kHeadDim>
cudaError_t launch_head_dim(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  const ForwardChoice choice = choose_forward(p);
  switch (choice.form) {
    case Form::kPlain: return launch_tiles<In, kHeadDim, Form::kPlain>(p, {}, workspace, stream);
    case Form::kOptions: return launch_tiles<In, kHeadDim, Form::kOptions>(p, {}, workspace, stream);
    case Form::kFewRows:
      return launch_tiles<In, kHeadDim, Form::kFewRows>(p, choice.few_rows, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

template <class In>
cudaError_t launch_forward(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  switch (padded_head_dim(p.sizes)) {
    case 64: return launch_head_dim<In, 64>(p, workspace, stream);
    case 128: return launch_head_dim<In, 128>(p, workspace, stream);
    case 256: return launch_head_dim<In, 256>(p, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::cuda::sm90
