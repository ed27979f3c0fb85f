// Forward: FlashAttention-2, algorithm 1 (Dao 2023). A block has some query rows and a slice of the D_v columns.
//
//   S = Q K^T    m' = max(m, rowmax S)    P = e^(S - m')    l = l e^(m - m') + rowsum P
//   O = O e^(m - m') + P V                at the end O / l and lse = m + log l
//
// With few queries the keys are also split over blocks (Dao et al. 2023, "Flash-Decoding"). Each block stores (m, l,
// O), and combine.cu merges them.
#pragma once

#include <cstddef>
#include <type_traits>

#include "../../core/sequence.h"
#include "../combine.h"
#include "../launch.h"
#include "../scores.cuh"
#include "cache_rows.cuh"
#include "simt.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::simt {

// The query rows of a tile: of one head or, packed, of all heads that share a key head, head after head.
template <bool kPacked>
struct QueryTile {
  int64_t b, first_head, first_row, count;
  int64_t seqlen_q;

  __device__ int64_t head(int n) const {
    return kPacked ? first_head + static_cast<uint32_t>(first_row + n) / static_cast<uint32_t>(seqlen_q)
                   : first_head;
  }
  __device__ int64_t query(int n) const {
    return kPacked ? static_cast<uint32_t>(first_row + n) % static_cast<uint32_t>(seqlen_q) : first_row + n;
  }
  // The first query of the tile, and the end of its queries.
  __device__ Range queries() const {
    return kPacked ? Range{0, seqlen_q} : Range{first_row, first_row + count};
  }
};

// Converts the thread's products to scores, in place. Bit 4 r + c of the result: that element attends. Keys before
// `first_masked` have no column in the mask.
template <class T, int kTileRows, class Tile>
__device__ uint32_t finish_scores(const AttentionParams& p, const Tile& tile, int64_t j0,
                                  ScoreTile<T, kTileRows>& scores, int64_t first_masked = 0) {
  uint32_t attends = 0;
  const TileChunks chunks(p.band, tile.queries().begin);
#pragma unroll 1
  for (int e = 0; e < kTileRows / kSide * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    const bool inside = row < tile.count && j0 + col < p.sizes.seqlen_k;
    const Score<T> score = finish_score(p, chunks, scores[row][col], tile.b, tile.head(row), tile.query(row),
                                        j0 + col, inside, j0 + col >= first_masked);
    scores[row][col] = score.value;
    attends |= uint32_t{score.attends} << e;
  }
  return attends;
}

// The running statistics of a thread's rows. All threads of a row have its maximum. The sum is over the thread's own
// elements until the end.
template <class T, int R>
struct RowStatistics {
  T max[R], sum[R];

  __device__ RowStatistics() {
    for (int r = 0; r < R; ++r) max[r] = -kInf<T>, sum[r] = T(0);
  }

  // Converts a tile of scores to P and updates the statistics. The caller multiplies the row's sums so far by
  // factor[r].
  __device__ void update(ScoreTile<T, kSide * R>& scores, uint32_t attends, T (&factor)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      T row[kCols], new_max = max[r];
#pragma unroll
      for (int c = 0; c < kCols; ++c) new_max = larger(new_max, row[c] = scores[tile_row(r)][tile_col(c)]);
      new_max = row_maximum(new_max);
      // If nothing is visible so far, any finite reference works: e^(-inf - reference) is 0.
      const T reference = new_max == -kInf<T> ? T(0) : new_max;
      factor[r] = std::exp(max[r] - reference);
      sum[r] *= factor[r];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const T prob = std::exp(row[c] - reference);
        sum[r] += prob;
        scores[tile_row(r)][tile_col(c)] = weight_of(prob, attends >> (r * kCols + c) & 1);
      }
      max[r] = new_max;
    }
  }
};

// Multiplies tiles of weights by dropout's factors. Called after the row sum, because dropout applies to the normalised
// P.
template <class T, int kTileRows, class Tile, class... Weights>
__device__ void drop_probs(const AttentionParams& p, PhiloxKey key, const Tile& tile, int64_t j0,
                           Weights&... weights) {
#pragma unroll 1
  for (int e = 0; e < kTileRows / kSide * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    const T factor = dropout_factor<T>(p, key, tile.b, tile.head(row), tile.query(row), j0 + col);
    ((weights[row][col] *= factor), ...);
  }
}

// A block's memory. Rows of a cache in pages or of 8 bits are looked up tile by tile.
template <class In, int kTileRows, bool kCache>
struct ForwardMemory : SharedMemory<Accumulator<In>, kTileRows> {
  static constexpr std::nullptr_t found_keys = nullptr, found_values = nullptr;
};
template <class In, int kTileRows>
struct ForwardMemory<In, kTileRows, true> : SharedMemory<Accumulator<In>, kTileRows>, CacheTile<In> {};

// The rows of the tile that begins at key j0, of keys or of values: looked-up rows, or rows of the tensor.
template <class In, class Found>
__device__ auto rows_of_tile(Found found, const Tensor4& t, int64_t b, int64_t h_kv, int64_t j0,
                             int64_t count) {
  if constexpr (std::is_null_pointer_v<Found>) {
    return Rows<In>{t.row<In>(b, h_kv, j0), t.stride_s, count};
  } else {
    return FoundRows<In>{found, count};
  }
}

template <class In, int R, int kSlice, bool kCache, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const AttentionParams call, const ForwardSchedule schedule, const Partials<T> partials) {
  constexpr int kTileRows = kSide * R, kSliceCols = kSlice / kSide;
  constexpr bool kPacked = R == kDecodeRows;
  auto& shared = shared_memory<ForwardMemory<In, kTileRows, kCache>>();

  // The part of this block. The last rows of a head are first, because in a causal call they take longest.
  const int64_t heads = call.sizes.heads / schedule.heads_per_tile, head = blockIdx.x / schedule.row_blocks;
  const int64_t block = schedule.row_blocks - 1 - blockIdx.x % schedule.row_blocks;
  AttentionParams p = of_sequence(call, head / heads);
  if constexpr (kCache) count_columns_by_key(p.varlen.cache, p.mask);
  const int64_t first_masked = kCache && p.varlen.cache.tree_mask ? p.varlen.cache.first_masked : 0;
  const Sizes& z = p.sizes;
  QueryTile<kPacked> tile{head / heads, head % heads * schedule.heads_per_tile, block * kTileRows, 0,
                          z.seqlen_q};
  const int64_t rows_left = schedule.heads_per_tile * z.seqlen_q - tile.first_row;
  if (rows_left <= 0) return;  // the sequence ends before these rows
  tile.count = rows_left < kTileRows ? rows_left : kTileRows;
  const int64_t h_kv = z.kv_head(tile.first_head), first_col = int64_t{blockIdx.y} * kSlice;
  const auto q_row = [&](int n) {
    return n < tile.count ? p.q.row<In>(tile.b, tile.head(n), tile.query(n)) : nullptr;
  };
  const PhiloxKey key = dropout_key(p.dropout);

  const Range queries = tile.queries();
  const Range seen = visible_keys(p.band, queries.begin, queries.end, z.seqlen_k);
  const int64_t split_begin = blockIdx.z * schedule.tiles_per_split * kBlockK;
  const int64_t split_end = split_begin + schedule.tiles_per_split * kBlockK;
  const int64_t first_key = seen.begin / kBlockK * kBlockK;
  const int64_t begin = first_key > split_begin ? first_key : split_begin;
  const int64_t end = seen.end < split_end ? seen.end : split_end;

  RowStatistics<T, R> statistics;
  T out[R][kSliceCols] = {};
  for (int64_t j0 = begin; j0 < end; j0 += kBlockK) {
    const int64_t count = smaller<int64_t>(z.seqlen_k - j0, kBlockK);
    // All threads have finished the last tile's values, so its rows may be overwritten. The products' first barrier
    // publishes the new rows.
    if constexpr (kCache) shared.look_up(p, h_kv, j0, count);
    const auto k = rows_of_tile<In>(shared.found_keys, p.k, tile.b, h_kv, j0, count);
    const auto v = rows_of_tile<In>(shared.found_values, p.v, tile.b, h_kv, j0, count);
    const bool partial = p.mask || !band_covers(p.band, queries.begin, queries.end, j0, j0 + count);

    T products[R][kCols] = {};
    add_row_products(shared, q_row, k, z.head_dim, products);
    store_elements(products, shared.weights);
    const uint32_t attends = finish_scores<T, kTileRows>(p, tile, j0, shared.weights, first_masked);

    T factor[R];
    statistics.update(shared.weights, attends, factor);
    if (p.dropout) drop_probs<T, kTileRows>(p, key, tile, j0, shared.weights);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kSliceCols; ++c) out[r][c] *= factor[r];
    add_weighted_rows<false>(shared, shared.weights, v, first_col, z.head_dim_v, partial, out);
  }

#pragma unroll
  for (int r = 0; r < R; ++r) {
    const T max = statistics.max[r], sum = row_total(statistics.sum[r]);
    if (tile_row(r) >= tile.count) continue;
    const int64_t h = tile.head(tile_row(r)), i = tile.query(tile_row(r));
    const int64_t row = p.lse_index(tile.b, h, i);
    const int64_t partial_row = blockIdx.z * call.lse_size() + row;
    const bool writes_statistics = thread_x() == 0 && blockIdx.y == 0;
    const RowResult<T> result = finish_row(p, tile.b, h, max, sum);
    if (schedule.splits == 1 && writes_statistics) static_cast<T*>(p.lse)[row] = result.lse;
    if (schedule.splits > 1 && writes_statistics) {
      partials.row_max[partial_row] = max;
      partials.row_sum[partial_row] = sum;
    }
#pragma unroll
    for (int c = 0; c < kSliceCols; ++c) {
      const int64_t col = first_col + tile_col(c);
      if (col >= z.head_dim_v) continue;
      if (schedule.splits == 1) {
        p.out.row<In>(tile.b, h, i)[col] = round_to<In>(out[r][c] * result.out_factor);
      } else {
        partials.out[partial_row * z.head_dim_v + col] = out[r][c];
      }
    }
  }
}

template <class In, int R, int kSlice, bool kCache, class T = Accumulator<In>>
cudaError_t launch_attend(const AttentionParams& p, const ForwardSchedule& schedule,
                          const Partials<T>& partials, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(ForwardMemory<In, kSide * R, kCache>);
  static_assert(kShared <= kTuringSharedBytes);
  const LaunchShape shape{schedule.tasks, schedule.slices, schedule.splits, kThreads, kShared};
  return launch(forward_kernel<In, R, kSlice, kCache>, shape, stream, p, schedule, partials);
}

template <class In, bool kCache>
auto attend_of(const ForwardSchedule& schedule, int64_t head_dim_v) {
  const bool narrow = slice_of(head_dim_v) == kNarrowSlice;
  if (schedule.decode)
    return narrow ? launch_attend<In, kDecodeRows, kNarrowSlice, kCache>
                  : launch_attend<In, kDecodeRows, kMaxSlice, kCache>;
  return narrow ? launch_attend<In, kRows, kNarrowSlice, kCache>
                : launch_attend<In, kRows, kMaxSlice, kCache>;
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_forward(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  const ForwardSchedule schedule = schedule_forward(p);
  const Partials<T> partials(workspace, p, schedule.splits);
  const CacheParams& cache = p.varlen.cache;
  const bool is_cache = cache.pages || cache.dtype != CacheDType::kOfQuery || cache.tree_mask;
  const auto attend = is_cache ? attend_of<In, true>(schedule, p.sizes.head_dim_v)
                               : attend_of<In, false>(schedule, p.sizes.head_dim_v);
  return in_order([&] { return attend(p, schedule, partials, stream); },
                  [&] { return launch_combine(p, schedule.splits, workspace, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
