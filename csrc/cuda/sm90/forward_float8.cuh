// Forward with products of float8_e4m3fn: FlashAttention-3, section 3.3 (Shah et al. 2024). The loop is the loop of
// forward.cuh. Three things differ:
//
//   V^T    wgmma reads 8-bit operands along k only. Three warps of the producer warpgroup transpose each tile of V, while the
//          consumers work on the tile before (transpose.cuh).
//   P      is rounded to float8 after a multiplication by 2^8. It stays in its registers as the left operand: V^T has
//          its keys in the order of the threads that hold P.
//   out    = O v_scale / l, and a score is <q, k> scale k_scale. The factors are constant in a sequence and key head.
//
// Keys and values are caches, also in pages (ops/cache/kvcache.h). TMA copies a tile in boxes that lie in one page each.
#pragma once

#include <numeric>

#include "../call_of_block.cuh"
#include "../device.h"
#include "../launch.h"
#include "../shared_memory.h"
#include "float8_rows.cuh"
#include "pipeline.cuh"
#include "ptx.h"
#include "schedule.h"
#include "sm90.h"
#include "softmax.cuh"
#include "tensor_map.h"
#include "transpose.cuh"

namespace flash_attn_ext::cuda::sm90 {

template <int kHeadDim_>
struct Float8Forward {
  static constexpr int kHeadDim = kHeadDim_, kRows = float8_rows(kHeadDim), kKeys = float8_keys(kHeadDim);
  static constexpr int kConsumers = kRows / kWarpgroupRows, kTransposers = 3;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr bool kPacked = true;  // for call_of_block()
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40,
                       kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (64 << 10) / kWarpgroup);

  static constexpr int kPanelColumns8 = kPanelRowBytes;
  using QTile = Panels<Float8, kRows, whole_panels(kHeadDim, kPanelColumns8)>;
  using KTile = Panels<Float8, kKeys, whole_panels(kHeadDim, kPanelColumns8)>;
  using VTile = KTile;
  using TransposedTile = Panels<Float8, kHeadDim, whole_panels(kKeys, kPanelColumns8)>;

  struct Shared {
    QTile q;
    Pipeline<KTile> k;
    Pipeline<VTile> v;
    Pipeline<TransposedTile> v_T;
  };
  static_assert(sizeof(Shared) <= kMaxHopperSharedBytes);
};

struct Float8Arguments {
  CUtensorMap k, v;
  AttentionParams p;
  ForwardSchedule schedule;
  float scale;
  int boxes, box_rows;  // of a tile of keys
  Divider by_page;      // the rows of a page, if there are pages
};

// The rows of a block, and the key tiles that they see.
struct Float8Range {
  int b, h, h_kv, first_row, first_key, tiles, seqlen_k;
  bool has_rows;
  ShortBand band;
};

template <class Config>
__device__ Float8Range float8_range(const Float8Arguments& a) {
  const Task task = task_of(a.schedule, blockIdx.x);
  const AttentionParams call = call_of_block<Config>(a.p, task.b);
  const Sizes& z = call.sizes;
  Float8Range range;
  range.b = task.b;
  range.h = task.h;
  range.h_kv = task.h_kv;
  range.first_row = task.row_block * Config::kRows;
  range.seqlen_k = static_cast<int>(z.seqlen_k);
  range.has_rows = range.first_row < z.seqlen_q;
  range.band = ShortBand(call);
  const Range seen = visible_keys(call.band.without_chunks(), range.first_row,
                                  smaller<int64_t>(range.first_row + Config::kRows, z.seqlen_q), z.seqlen_k);
  range.first_key = static_cast<int>(seen.begin) / Config::kKeys * Config::kKeys;
  range.tiles =
      seen.begin < seen.end ? ceil_div(static_cast<int>(seen.end) - range.first_key, Config::kKeys) : 0;
  return range;
}

// ---- load: one thread

template <class Config>
__device__ void load_keys(const Float8Arguments& a, const Float8Range& range,
                          typename Config::Shared& shared) {
  using Tile = typename Config::KTile;
  const AttentionParams call = call_of_block<Config>(a.p, range.b);
  const CacheParams& cache = call.varlen.cache;
  const int first_k = static_cast<int>(call.varlen.first_k);
  for (int n = 0; n < range.tiles; ++n) {
    const uint32_t stage = shared.k.stage(n), parity = shared.k.parity(n) ^ 1;
    ptx::barrier_wait(shared.k.empty[stage], parity);  // the consumers have read K of tile n - 2
    ptx::barrier_wait(shared.v.empty[stage], parity);  // V of tile n - 2 is transposed
    ptx::barrier_arrive_expecting(shared.k.full[stage],
                                  sizeof(Tile));  // the phase ends when all bytes have landed
    ptx::barrier_arrive_expecting(shared.v.full[stage], sizeof(Tile));  // likewise
    for (int box = 0; box < a.boxes; ++box) {
      int row = first_k + range.first_key + n * Config::kKeys + box * a.box_rows,
          page = static_cast<int>(cache.cache);
      if (cache.pages) {
        // A box may begin after the last page: its rows are hidden.
        const int last_row = static_cast<int>(cache.pages.count * cache.pages.page_size) - 1;
        page = static_cast<int>(cache.pages.page_of(min(row, last_row)));
        row = a.by_page.remainder(row);
      }
      for (int panel = 0; panel < Tile::kCount; ++panel) {
        const int offset = box * a.box_rows * kPanelRowBytes, column = panel * Tile::kColumnsOfPanel;
        ptx::load_box(shared.k.tiles[stage].bytes[panel] + offset, &a.k, {column, row, range.h_kv, page},
                      shared.k.full[stage]);
        ptx::load_box(shared.v.tiles[stage].bytes[panel] + offset, &a.v, {column, row, range.h_kv, page},
                      shared.v.full[stage]);
      }
    }
  }
}

// ---- transpose V: the other warps of the producer warpgroup

template <class Config>
__device__ void transpose_values(const Float8Range& range, typename Config::Shared& shared) {
  const int warp = ptx::uniform(threadIdx.x / 32) - 1;
  for (int n = 0; n < range.tiles; ++n) {
    const uint32_t stage = shared.v.stage(n);
    shared.v.wait(n);
    ptx::barrier_wait(shared.v_T.empty[stage],
                      shared.v_T.parity(n) ^ 1);  // the consumers have read tile n - 2
    transpose_tile<Config::kTransposers>(shared.v.tiles[stage], shared.v_T.tiles[stage], warp,
                                         range.seqlen_k - range.first_key - n * Config::kKeys);
    ptx::proxy_fence();  // publishes this lane's writes to wgmma
    __syncwarp();        // all lanes have read V, and have published V^T
    shared.v.release(n);
    if (threadIdx.x % 32 == 0)
      ptx::barrier_arrive(shared.v_T.full[stage]);  // this warp's part of V^T is complete
  }
}

// ---- compute: a consumer warpgroup, for its 64 rows

// Starts S = Q K^T.
template <class Config, int kElements>
__device__ void start_float8_scores(uint64_t q, uint64_t k, float (&s)[kElements]) {
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 32; ++n)
    ptx::wgmma_shared_float8(s, step_descriptor(q, columns_step<typename Config::QTile>(n)),
                             step_descriptor(k, columns_step<typename Config::KTile>(n)), n > 0);
  ptx::wgmma_commit();  // ends the batch of S
}

// Starts O += P V.
template <class Config, int kSteps, int kElements>
__device__ void start_float8_output(const uint32_t (&weights)[kSteps][4], uint64_t v_T,
                                    float (&o)[kElements]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
    ptx::wgmma_registers_float8(o, weights[n],
                                step_descriptor(v_T, columns_step<typename Config::TransposedTile>(n)));
  ptx::wgmma_commit();  // ends the batch of O
}

template <class Config>
__device__ void consume(const Float8Arguments& a, const Float8Range& range, typename Config::Shared& shared) {
  constexpr int kKeys = Config::kKeys, kHeadDim = Config::kHeadDim;
  // If O is long, it is scaled while S = Q K^T runs, not after the exponentials.
  constexpr bool kScalesUnderScores = kHeadDim > 128;
  const int warpgroup = ptx::uniform(threadIdx.x / kWarpgroup) - 1, warp = threadIdx.x % kWarpgroup / 32;
  const int first_row = warpgroup * kWarpgroupRows, warp_row = first_row + warp * kWarpRows;  // of the tile
  const ShortBand& band = range.band;
  float s[kKeys / 2], o[kHeadDim / 2] = {}, factor[2], scale2 = 0;
  uint32_t weights[kKeys / 32][4];
  RowStatistics statistics;
  if (range.tiles > 0) {
    const auto call = call_of_block<Config>(a.p, range.b);
    const Float8Factors factors(call, a.scale, range.h_kv);
    scale2 = factors.scale2();
    load_queries<kHeadDim>(call, range.h, range.first_row + warp_row, warp_row, factors.negates_query,
                           shared.q);
    ptx::proxy_fence();                                  // publishes this thread's queries to wgmma
    ptx::named_barrier_sync<kWarpgroup>(1 + warpgroup);  // all queries of the warpgroup are written
  }
  const uint32_t q_address = ptx::shared_address(&shared.q) + first_row * kPanelRowBytes;
  const uint64_t q = along_columns(q_address);
  const uint64_t first_k = along_columns(ptx::shared_address(&shared.k.tiles));
  const uint64_t first_v = along_columns(ptx::shared_address(&shared.v_T.tiles));
  int query[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) query[r] = range.first_row + warp_row + first_row_in_warp() + 8 * r;
  const auto softmax = [&](int n) {
    const int key = range.first_key + n * kKeys;
    if (!band.shows_all(range.first_row + first_row, kWarpgroupRows, key, kKeys))
      hide_invisible(band, query, key, s);
    statistics.update<kWeightExponent>(scale2, s, factor);
  };

  if (range.tiles > 0) {
    const uint64_t k = step_descriptor(first_k, shared.k.wait(0));
    ptx::wgmma_fence();  // s may be written: no product uses it
    start_float8_scores<Config>(q, k, s);
    ptx::wgmma_wait<0>(s);  // s is complete, K has been read
    shared.k.release(0);    // K may be overwritten
    softmax(0);
    round_weights_to_float8(s, weights);
  }
  for (int n = 1; n < range.tiles; ++n) {
    const uint64_t k = step_descriptor(first_k, shared.k.wait(n));
    ptx::wgmma_fence();  // publishes weights and o to wgmma; s may be written
    start_float8_scores<Config>(q, k, s);
    if constexpr (kScalesUnderScores) scale_rows(o, factor);  // while the tensor cores work on s
    const uint64_t v_T = step_descriptor(first_v, shared.v_T.wait(n - 1));
    ptx::wgmma_fence();  // each batch needs one, or ptxas inserts it
    start_float8_output<Config>(weights, v_T, o);
    ptx::wgmma_wait<1>(s);  // s is complete, K has been read
    shared.k.release(n);    // K may be overwritten
    softmax(n);             // the exponentials overlap with the product O
    ptx::compute_before_wait(statistics.sum[0] + statistics.sum[1], q_address);
    ptx::wgmma_wait<0>(o);      // o is complete, weights and V^T have been read
    shared.v_T.release(n - 1);  // V^T may be overwritten
    if constexpr (!kScalesUnderScores) scale_rows(o, factor);
    round_weights_to_float8(s, weights);
  }
  if (range.tiles > 0) {
    if constexpr (kScalesUnderScores) scale_rows(o, factor);
    const uint64_t v_T = step_descriptor(first_v, shared.v_T.wait(range.tiles - 1));
    ptx::wgmma_fence();  // publishes weights and o to wgmma
    start_float8_output<Config>(weights, v_T, o);
    ptx::wgmma_wait<0>(o);  // o is complete
  }
  // Computes the params of the sequence again: the loop has no registers to keep them.
  const auto call = call_of_block<Config>(a.p, range.b);
  const Range tiles{range.first_key, int64_t{range.first_key} + range.tiles * kKeys};
  Float8Factors factors;
  if (range.tiles > 0) factors = Float8Factors(call, a.scale, range.h_kv);
  finish_float8_rows<kHeadDim>(call, range.b, range.h, range.first_row + warp_row, tiles, factors, statistics,
                               o);
}

template <int kHeadDim, class Config = Float8Forward<kHeadDim>>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_float8_kernel(const __grid_constant__ Float8Arguments a) {
#if defined(FA_HAS_HOPPER)
  auto& shared = shared_memory<typename Config::Shared, kMaxHopperSharedBytes>();
  const Float8Range range = float8_range<Config>(a);
  if (!range.has_rows) return;  // the sequence ends before these rows
  if (threadIdx.x == 0) {
    shared.k.init(Config::kConsumers * 4);
    shared.v.init(Config::kTransposers);
    shared.v_T.init(Config::kConsumers * 4, Config::kTransposers);
    ptx::barrier_init_fence();  // publishes the barriers to TMA
  }
  __syncthreads();  // publishes the barriers to all threads
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (threadIdx.x >= 32)
      transpose_values<Config>(range, shared);
    else if (threadIdx.x == 0)
      load_keys<Config>(a, range, shared);
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    consume<Config>(a, range, shared);
  }
#else
  __trap();  // this build has no code for compute capability 9.0a: an error, not an empty result
#endif
}

// ---- launch

template <int kHeadDim>
cudaError_t launch_float8(const AttentionParams& p, cudaStream_t stream) {
  using Config = Float8Forward<kHeadDim>;
  const Sizes& z = p.sizes;
  const CacheParams& cache = p.varlen.cache;
  const int64_t rows = cache.pages ? cache.pages.page_size : z.seqlen_k;  // of a cache or a page
  const int64_t box_rows = cache.pages ? std::gcd(rows, int64_t{Config::kKeys}) : Config::kKeys;
  Float8Arguments a{{},
                    {},
                    p,
                    schedule_forward(z, Config::kRows),
                    static_cast<float>(p.scale),
                    static_cast<int>(Config::kKeys / box_rows),
                    static_cast<int>(box_rows),
                    cache.pages ? Divider(rows) : Divider()};
  static_assert(sizeof(a) <= 4096);
  const auto map = [&](CUtensorMap& of, const Tensor4& t, int64_t columns) {
    return encode_tensor_map(of, t.data, kFloat8Element, columns,
                             {{rows, t.stride_s, static_cast<uint32_t>(box_rows)},
                              {z.heads_kv, t.stride_h},
                              {cache.caches, t.stride_b}});
  };
  const LaunchShape shape{a.schedule.tasks, 1, 1, Config::kThreads, sizeof(typename Config::Shared)};
  return in_order([&] { return map(a.k, p.k, z.head_dim); },    //
                  [&] { return map(a.v, p.v, z.head_dim_v); },  //
                  [&] { return launch(forward_float8_kernel<kHeadDim>, shape, stream, a); });
}

}  // namespace flash_attn_ext::cuda::sm90
