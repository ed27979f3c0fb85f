// Backward for Hopper: FlashAttention-2, algorithm 2 (Dao 2023), in the form of FlashAttention-3 (Shah et al. 2024). A
// block computes dK and dV of 128 keys (64 beyond a head dimension of 128). It loops over the queries of all heads that
// share these keys:
//
//   S^T = K Q^T    P^T = 2^(S^T - lse)    dP^T = V dO^T    dS^T = P^T o (dP^T - delta)
//   dV += P^T dO   dK += dS^T Q           dQ += dS K
//
// P and dS are computed transposed, so that their registers are left operands. dS is also written to shared memory, for
// dQ. Beyond a head dimension of 128, dK and dV of 64 keys fill the registers of two warpgroups. Then each warpgroup
// has half of the columns of dK and dV. It computes P and dS for half of the queries, and writes both to shared memory.
// TMA loads K, V, Q and dO. dK and dV stay in registers to the end. A separate thread adds each tile's part of dQ to
// fp32 sums in global memory.
//
// In kernels in pairs, two blocks with neighbouring tiles of keys share the loads of Q and dO (pairs.cuh). Both blocks
// visit all tiles of queries that either block sees. The band hides the elements that a block does not see.
#pragma once

#include "../call_of_block.cuh"
#include "../shared_memory.h"
#include "backward_range.cuh"
#include "backward_rows.cuh"
#include "backward_tile.cuh"
#include "key_mask.cuh"
#include "pairs.cuh"

namespace flash_attn_ext::cuda::sm90 {

// The plain kernels have neither softcap nor key masks nor packed sequences; the other kernels have all of them. flex_backward.cuh has
// the kernels with functions of the user.
template <class In, int kHeadDim_, int kHeadDimV_, bool kPlain_, bool kFunctions_ = false,
          bool kPaired_ = false>
struct Backward {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static_assert(kHeadDimV <= kHeadDim);
  static constexpr bool kPlain = kPlain_, kPacked = !kPlain_, kFunctions = kFunctions_, kScores = false;
  static constexpr bool kPaired = kPaired_;
  static_assert(kPlain || !kPaired);
  using Arguments = BackwardArguments;
  using Cursor = RowTileCursor;
  static constexpr int kConsumers = 2, kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup, kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kKeys = backward_keys(kHeadDim, kFunctions), kRows = backward_rows(kHeadDim, kPlain);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (64 << 10) / kWarpgroup);
  // The blocks that visit the same tiles of queries together, and their keys.
  static constexpr int kSharers = kPaired ? kPairBlocks : 1, kSharedKeys = kSharers * kKeys;

  // The part of a warpgroup. If columns are not split: 64 keys of S, dP, dK and dV, with all columns. If columns are
  // split: all keys, half of the queries of S and dP, half of the columns of dK and dV.
  static constexpr bool kSplitsColumns = kKeys == kWarpgroupRows;
  static constexpr int kOwnRows = kSplitsColumns ? kRows / kConsumers : kRows;
  using DKColumns = ColumnsOfWarpgroup<kSplitsColumns ? kHeadDim / kConsumers : kHeadDim>;
  using DVColumns = ColumnsOfWarpgroup<kSplitsColumns ? kHeadDimV / kConsumers : kHeadDimV>;
  static_assert(kSplitsColumns || kKeys == kConsumers * kWarpgroupRows);
  // Columns of dQ of a warpgroup: all columns of 64 of 128 queries, or half of the columns of 64 queries. With 96
  // columns, each warpgroup has a panel; half of the second panel is zeros, which are not added.
  static constexpr bool kPadsDQ = kHeadDim == 96;
  using DQColumns = ColumnsOfWarpgroup<kPadsDQ               ? kPanelColumns
                                       : kRows == kPieceRows ? kHeadDim / kConsumers
                                                             : kHeadDim>;
  static_assert(kRows == kPieceRows || kRows == kConsumers * kPieceRows);

  using KTile = Panels<In, kKeys, whole_panels(kHeadDim)>;
  using VTile = Panels<In, kKeys, whole_panels(kHeadDimV)>;
  using WeightTile = Panels<In, kKeys, kRows>;  // dS^T or P^T
  template <int kColumns>
  struct RowTile : Panels<In, kRows, whole_panels(kColumns)> {
    float terms[kRows];
  };
  using QTile = RowTile<kHeadDim>;
  using DOutTile = RowTile<kHeadDimV>;
  static constexpr int kEights = kHeadDim / 8;  // of dQ
  using DQTile = float[kRows / kPieceRows * kEights][kWarpgroup][4];

  template <class Tile, int kStages>
  using RowPipeline = std::conditional_t<kPaired, PairPipeline<Tile, kStages>, Pipeline<Tile, kStages>>;

  struct Shared {
    RowPipeline<QTile, kHeadDim == 256 ? 1 : 2> q;  // with lse
    // With delta. One stage also protects the buffer of P.
    RowPipeline<DOutTile, kSplitsColumns ? 1 : 2> dout;
    KTile k;
    VTile v;
    // dS of tile n is in weights[n % 2]. If columns are split, P is in weights[2].
    WeightTile weights[kSplitsColumns ? 3 : 2];
    DQTile dq;
    ptx::Barrier k_full, v_full, dq_full, dq_empty;
    int block;  // number of this block, in the order in which blocks begin
  };
  static_assert(sizeof(Shared) <= kMaxHopperSharedBytes);
};

// ---- load: two threads of the producer warpgroup, one for K, Q and lse, one for V, dO and delta

template <class Config, class KeyTile, class Rows>
__device__ void produce(const typename Config::Arguments& a, const BackwardRange& range,
                        const CUtensorMap& keys_map, KeyTile& keys, ptx::Barrier& keys_full,
                        const CUtensorMap& rows_map, const float* terms, Rows& rows) {
  const int tiles = tiles_of(a, range);
  if (tiles > 0)
    load_tile(keys, keys_map, range.k_row + range.key_tile * Config::kKeys, range.h_kv, range.map_b,
              keys_full);
  typename Config::Cursor at(a, range);
  for (int n = 0; n < tiles; ++n, at.advance(a, range)) {
    const int stage = rows.stage(n),
              tile_of_terms = range.workspace_tile + at.head * a.w.tiles.of_head + at.tile;
    const float* tile_terms = terms + int64_t{tile_of_terms} * Config::kRows;
    auto& tile = rows.tiles[stage];
    ptx::barrier_wait(rows.empty[stage], rows.parity(n) ^ 1);  // the consumers have read this stage
    const int row = range.q_row + at.tile * Config::kRows;
    if constexpr (Config::kPaired)
      load_half(tile, rows_map, row, at.head, range.map_b, rows.full[stage], sizeof(tile.terms));
    else
      load_tile(tile, rows_map, row, at.head, range.map_b, rows.full[stage], sizeof(tile.terms));
    ptx::load_bytes(tile.terms, tile_terms, sizeof(tile.terms), rows.full[stage]);
  }
}

// ---- add to dQ: a third thread of the producer warpgroup

// The turn in which a tile of keys adds to a tile of dQ. Tiles of later keys add first; `last` is the last tile that
// any query sees. In a causal call a block begins with the queries at its diagonal. These queries see no later keys, so
// the block does not wait.
template <class Config>
__device__ int turn_of(const BackwardArguments& a, const BackwardRange& range, const RowTileCursor& at) {
  const ShortBand& band = Config::kPlain ? a.band : range.band;
  const int end_row = min((at.tile + 1) * Config::kRows, band.seqlen_q);
  return min((band.end(end_row - 1) - 1) / Config::kKeys, range.last_key_tile) - range.key_tile;
}

template <class Config>
__device__ void add_dq(const typename Config::Arguments& a, const BackwardRange& range,
                       typename Config::Shared& shared) {
  const int first_head = range.b * static_cast<int>(a.p.sizes.heads);
  const int tiles = tiles_of(a, range);
  typename Config::Cursor at(a, range);
  for (int n = 0; n < tiles; ++n, at.advance(a, range)) {
    const int tile = range.workspace_tile + at.head * a.w.tiles.of_head + at.tile;
    int32_t* const turns = a.w.turns + (first_head + at.head) * a.w.tiles.longest + at.tile;
    ptx::barrier_wait(shared.dq_full, n % 2);  // the consumers have written all of dQ
    const int turn = a.p.deterministic ? turn_of<Config>(a, range, at) : 0;
    if (a.p.deterministic) ptx::acquire_bulk_turn(turns, turn);  // the blocks before this block have added
    constexpr int kElements = sizeof(shared.dq) / sizeof(float);
    if (!Config::kScores || a.p.dq)  // the second pass of captured tensors has no dQ
      ptx::bulk_add(a.w.dq + int64_t{tile} * kElements, &shared.dq[0][0][0], kElements);
    ptx::bulk_commit();                    // ends the batch of these adds
    ptx::bulk_wait_read();                 // the copy engine has read dQ in shared memory
    ptx::barrier_arrive(shared.dq_empty);  // the consumers may overwrite it
    if (!a.p.deterministic) continue;
    ptx::bulk_wait();               // the sums are in global memory
    ptx::release_bulk_turn(turns);  // the next block may add
  }
}

// ---- compute: a consumer warpgroup, for its part

template <class In, class Config>
__device__ void consume(const typename Config::Arguments& a, const BackwardRange& range,
                        typename Config::Shared& shared) {
  constexpr int kRows = Config::kRows, kOwnRows = Config::kOwnRows;
  constexpr bool kSplitsColumns = Config::kSplitsColumns;
  // Converts S and dP to P and dS in tiles at an edge. Not inlined, because there are too few registers.
  constexpr bool kMasksAtOnce = kOwnRows <= 64;
  static_assert(kMasksAtOnce || Config::kPlain);
  constexpr int kAll = Config::kConsumerThreads;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  using QTile = typename Config::QTile;
  using DOutTile = typename Config::DOutTile;
  using WeightTile = typename Config::WeightTile;
  const BackwardParams& p = a.p;
  const int warpgroup = ptx::uniform(threadIdx.x / kWarpgroup) - 1, warp = threadIdx.x % kWarpgroup / 32;
  const int own_key = kSplitsColumns ? 0 : warpgroup * kWarpgroupRows;
  const int own_row = kSplitsColumns ? warpgroup * kOwnRows : 0;
  const typename Config::DKColumns dk_columns(kSplitsColumns ? warpgroup : 0);
  const typename Config::DVColumns dv_columns(kSplitsColumns ? warpgroup : 0);
  const int own_dq_row = kRows == kPieceRows ? 0 : warpgroup * kPieceRows;
  const typename Config::DQColumns dq_columns(kRows == kPieceRows ? warpgroup : 0);
  const int first_key = range.key_tile * Config::kKeys + own_key, warp_key = first_key + warp * kWarpRows;
  const ShortBand& band = Config::kPlain ? a.band : range.band;
  const ScoreScale& score = a.score;
  // Whether the mask shows this thread's two keys, and whether it shows the keys of all lanes.
  uint32_t attends = 3;
  bool all_attend = true;
  if constexpr (!Config::kPlain) {
    const int key = own_key + warp * kWarpRows + first_row_in_warp();
    attends = a.w.key_mask.attends(range.b, range.key_tile, key) |
              a.w.key_mask.attends(range.b, range.key_tile, key + 8) << 1;
    all_attend = __ballot_sync(kAllLanes, attends != 3) == 0;
  }

  // Descriptors of this warpgroup's part of each tile; for tiles in stages, of the first stage.
  const uint32_t own_keys = own_key * kPanelRowBytes, own_rows = own_row * kPanelRowBytes;
  const auto address_of = [](const void* tile) { return descriptor_address<Config::kPaired>(tile); };
  const uint32_t q_address = address_of(&shared.q.tiles), dout_address = address_of(&shared.dout.tiles);
  const uint32_t k_address = address_of(&shared.k), weights_address = address_of(&shared.weights);
  const uint64_t k = along_columns(k_address + own_keys), first_q = along_columns(q_address + own_rows);
  const uint64_t v = along_columns(address_of(&shared.v) + own_keys);
  const uint64_t first_dout = along_columns(dout_address + own_rows);
  const uint64_t first_q_rows = along_rows<QTile>(q_address);
  const uint64_t first_dout_rows = along_rows<DOutTile>(dout_address);
  const uint64_t k_rows = along_rows<KTile>(k_address);
  const uint64_t first_ds_rows =
      along_rows<WeightTile>(weights_address + own_dq_row / kPanelColumns * WeightTile::kPanelBytes);
  const uint64_t first_ds_columns = along_columns(weights_address);
  const uint64_t p_columns = along_columns(weights_address + 2 * sizeof(WeightTile));

  float dk[dk_columns.kColumns / 2] = {}, dv[dv_columns.kColumns / 2] = {};
  const int tiles = tiles_of(a, range);
  if (tiles > 0) {
    ptx::barrier_wait(shared.k_full, 0);  // TMA has written K
    ptx::barrier_wait(shared.v_full, 0);  // TMA has written V
  }
  const int begin_row = range.first_tile * kRows + own_row, end_row = begin_row + range.row_tiles * kRows;
  int first_row = begin_row;
  [[maybe_unused]] typename Config::Cursor at(a, range);  // with functions of the user, the current tile
  for (int n = 0; n < tiles; ++n) {
    // The elements that the mask function shows. It is evaluated now, because no product owns registers.
    [[maybe_unused]] uint32_t shown = ~0u;
    if constexpr (Config::kFunctions) {
      first_row = at.tile * kRows + own_row;
      shown =
          a.template shown_elements<kOwnRows>(range, at, warp_key + first_row_in_warp(), first_row, attends);
    }
    float s[kOwnRows / 2], ds[kOwnRows / 2];
    uint32_t p16[kOwnRows / 16][4], ds16[kOwnRows / 16][4];

    const uint32_t q_stage = shared.q.wait(n);
    ptx::wgmma_fence();  // s may be written: no product uses it
    start_product<In, KTile, QTile, Config::kHeadDim>(k, step_descriptor(first_q, q_stage), s);
    ptx::wgmma_commit();  // ends the batch of S
    const Terms<kOwnRows / 8> lse2(shared.q.tiles[shared.q.stage(n)].terms + own_row);
    const uint32_t dout_stage = shared.dout.wait(n);
    ptx::wgmma_fence();  // ds may be written: no product uses it
    start_product<In, VTile, DOutTile, Config::kHeadDimV>(v, step_descriptor(first_dout, dout_stage), ds);
    ptx::wgmma_commit();    // ends the batch of dP
    ptx::wgmma_wait<1>(s);  // s is complete
    // Rows past the end have P = 0, because their lse is +inf.
    bool partial = !band.shows_all(first_row, kOwnRows, first_key, kWarpgroupRows);
    if constexpr (!Config::kPlain) partial |= !all_attend || first_row + kOwnRows > band.seqlen_q;
    if constexpr (Config::kFunctions) partial |= __ballot_sync(kAllLanes, shown != ~0u) != 0;
    const int weights_row = own_key + warp * kWarpRows;
    if constexpr (Config::kScores) {
      SeenElements elements(band, warp_key + first_row_in_warp(), first_row, attends);
      elements.hide_others(shown);
      a.finish_scores(range, at, warp_key + first_row_in_warp(), first_row, elements, s, ds);
      round_weights<In>(s, p16);
    } else if (!Config::kPlain && has_softcap(p)) {
      capped_probabilities<In>(score, lse2, s, p16);
    } else {
      probabilities(score.scale2, lse2, s);
      if constexpr (!kMasksAtOnce)
        if (partial) SeenElements(band, warp_key + first_row_in_warp(), first_row).clear_others(s);
      round_weights<In>(s, p16);
    }
    // The buffer of P is free, because TMA loaded this dO after all warpgroups had finished the last tile's dV.
    if constexpr (kSplitsColumns) store_to_tile(shared.weights[2], weights_row, own_row, p16);
    if constexpr (!Config::kScores) {
      const Terms<kOwnRows / 8> delta(shared.dout.tiles[shared.dout.stage(n)].terms + own_row);
      if constexpr (kMasksAtOnce && !kSplitsColumns) ptx::compute_before_wait(any_bits(p16), k_address);
      ptx::wgmma_wait<0>(ds);  // dP is complete
      score_gradients(s, delta, ds);
      if (partial) {
        SeenElements elements(band, warp_key + first_row_in_warp(), first_row, attends);
        if constexpr (Config::kFunctions) elements.hide_others(shown);
        elements.clear_others(ds);
        if constexpr (kMasksAtOnce) {
          elements.clear_others(p16);
          if constexpr (kSplitsColumns) store_to_tile(shared.weights[2], weights_row, own_row, p16);
        }
      }
    }
    round_weights<In>(ds, ds16);

    const uint32_t ds_stage = n % 2 * sizeof(WeightTile);
    // This buffer is free: the products that read it belong to tile n - 2. All warpgroups waited for these products
    // before the barrier of tile n - 1.
    store_to_tile(shared.weights[n % 2], weights_row, own_row, ds16);
    ptx::proxy_fence();  // publishes this thread's writes to wgmma
    const uint64_t q_rows = step_descriptor(first_q_rows, q_stage);
    const uint64_t dout_rows = step_descriptor(first_dout_rows, dout_stage);
    const uint64_t ds_rows = step_descriptor(first_ds_rows, ds_stage);
    float dq[dq_columns.kColumns / 2];
    const auto start_own_dq = [&] {
      for_each_part(dq_columns, dq, [&](int column, auto& part) {
        const uint64_t columns = step_descriptor(k_rows, first_column<KTile>(column));
        start_dq<In, Config::kKeys / 16>(ds_rows, columns, part);
      });
    };
    if constexpr (kSplitsColumns) {
      ptx::named_barrier_sync<kConsumerBarrier, kAll>();  // P and dS of all warpgroups are written
      ptx::wgmma_fence();                                 // publishes dv to wgmma
      for_each_part(dv_columns, dv, [&](int column, auto& part) {
        const uint64_t columns = step_descriptor(dout_rows, first_column<DOutTile>(column));
        start_sum<In, WeightTile, kRows / 16>(p_columns, columns, part);
      });
      ptx::wgmma_commit();  // ends the batch of dV
      ptx::wgmma_fence();   // publishes dk to wgmma
      for_each_part(dk_columns, dk, [&](int column, auto& part) {
        const uint64_t columns = step_descriptor(q_rows, first_column<QTile>(column));
        start_sum<In, WeightTile, kRows / 16>(step_descriptor(first_ds_columns, ds_stage), columns, part);
      });
      ptx::wgmma_commit();  // ends the batch of dK
      ptx::wgmma_fence();   // dq may be written: no product uses it
      start_own_dq();
      ptx::wgmma_commit();     // ends the batch of dQ
      ptx::wgmma_wait<2>(dv);  // dv is complete, dO has been read
      __syncwarp();            // all lanes have read lse and delta, which are in the stages of Q and dO
      shared.dout.release(n);  // dO may be overwritten
      ptx::wgmma_wait<1>(dk);  // dk is complete, Q has been read
      shared.q.release(n);     // Q may be overwritten
      ptx::wgmma_wait<0>(dq);  // dq is complete
    } else {
      ptx::wgmma_fence();  // publishes p16 and dv to wgmma
      start_sum<In>(p16, dout_rows, dv);
      ptx::wgmma_commit();                                // ends the batch of dV
      ptx::named_barrier_sync<kConsumerBarrier, kAll>();  // dS of all warpgroups is written
      ptx::wgmma_fence();                                 // dq may be written: no product uses it
      start_own_dq();
      ptx::wgmma_commit();  // ends the batch of dQ
      ptx::wgmma_fence();   // publishes ds16 and dk to wgmma
      start_sum<In>(ds16, q_rows, dk);
      ptx::wgmma_commit();     // ends the batch of dK
      ptx::wgmma_wait<2>(dv);  // dv is complete, dO has been read
      __syncwarp();            // all lanes have read lse and delta, which are in the stages of Q and dO
      shared.dout.release(n);  // dO may be overwritten
      ptx::wgmma_wait<1>(dq);  // dq is complete
    }
    ptx::barrier_wait(shared.dq_empty, n % 2 ^ 1);  // the copy engine has read dQ of tile n - 1
    for_each_part(dq_columns, dq, [&](int column, auto& part) {
      auto* const sums = &shared.dq[own_dq_row / kPieceRows * Config::kEights + column / 8];
      if (Config::kPadsDQ && warpgroup > 0)
        store_sums(sums, part_of<0, 16>(part));  // 32 of 64 columns exist
      else
        store_sums(sums, part);
    });
    ptx::proxy_fence();  // publishes this thread's writes to the copy engine
    __syncwarp();        // all lanes have published their writes
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.dq_full);  // dQ may be added
    if constexpr (!kSplitsColumns) {
      ptx::wgmma_wait<0>(dk);  // dk is complete, Q has been read
      shared.q.release(n);     // Q may be overwritten
    }
    if constexpr (Config::kFunctions)
      at.advance(a, range);
    else
      first_row = first_row + kRows < end_row ? first_row + kRows : begin_row;  // of the next head
  }
  const Range rows{int64_t{range.first_tile} * kRows, (int64_t{range.first_tile} + range.row_tiles) * kRows};
  // Computes the params of a packed sequence again, because the loop has too few registers to keep them.
  finish_keys<In, Config::kHeadDim>(call_of_block<Config>(p, range.b), a.w, range.b, range.h_kv, warp_key,
                                    dk_columns, dv_columns, rows, dk, dv, a.hidden());
}

template <class In, int kHeadDim, int kHeadDimV, bool kPlain,
          class Config = Backward<In, kHeadDim, kHeadDimV, kPlain>>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ typename Config::Arguments a) {
#if defined(FA_HAS_HOPPER)
  auto& shared = shared_memory<typename Config::Shared, kMaxHopperSharedBytes>();
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.k_full, 1);                               // arrivals: one producer thread
    ptx::barrier_init(shared.v_full, 1);                               // arrivals: one producer thread
    ptx::barrier_init(shared.dq_full, Config::kConsumerThreads / 32);  // one lane of each warp
    ptx::barrier_init(shared.dq_empty, 1);                             // arrivals: the thread that adds to dQ
    shared.q.init(Config::kConsumers * 4);
    shared.dout.init(Config::kConsumers * 4);
    ptx::barrier_init_fence();  // publishes the barriers to TMA
    // Numbers follow the order in which blocks begin. So a block waits only for blocks that have begun.
    shared.block = a.p.deterministic ? ptx::draw_ticket(a.w.ticket) : task_of_block(a);
  }
  if constexpr (Config::kPaired)
    begin_pair();
  else
    __syncthreads();  // publishes the barriers and the block's number to all threads
  const BackwardRange range = backward_range<Config>(a, ptx::uniform(shared.block));
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(a, range, a.k, shared.k, shared.k_full, a.q, a.w.lse2, shared.q);
    if (threadIdx.x == 32)
      produce<Config>(a, range, a.v, shared.v, shared.v_full, a.dout, a.w.delta, shared.dout);
    if (threadIdx.x == 64) add_dq<Config>(a, range, shared);
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    consume<In, Config>(a, range, shared);
  }
  if constexpr (Config::kPaired) end_pair();
#else
  __trap();  // this build has no code for compute capability 9.0a: an error, not an empty result
#endif
}

}  // namespace flash_attn_ext::cuda::sm90
