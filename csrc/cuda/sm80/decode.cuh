// Flash-Decoding (Dao et al. 2023) for few queries, where reading K and V takes most of the time. A block has
// 16 or 32 query rows of all heads that share a key head. So K and V are read once for all of these heads.
// The keys of a block are divided among its warps. Each warp has a separate ring of tiles, filled by
// cp.async. No warp waits for another warp before the end, when their (m, l, O) are merged. If there are few blocks,
// the keys are split over more blocks, and combine.cu merges the results.
#pragma once

#include <algorithm>

#include "../call_of_block.cuh"
#include "../combine.h"
#include "../launch.h"
#include "../shared_memory.h"
#include "decode_splits.h"
#include "gpu.h"
#include "sm80.h"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Each warp has kRing tiles of 16 keys. One tile is in use, the other tiles are in flight.
template <class In_, int kHeadDim_, int kRowTiles_, int kRing_, class Gpu_ = Ampere>
struct DecodeConfig {
  using In = In_;
  using Gpu = Gpu_;
  static constexpr int kRowTiles = kRowTiles_, kRows = kMmaRows * kRowTiles;  // query rows of a block
  static constexpr int kHeadDim =
      kHeadDim_;  // of q, k, v and out; smaller head dimensions are padded with zeros
  static constexpr int kRing = kRing_;
  // Whether the kernel computes packed sequences and caches. With two row tiles there are too few registers for the
  // params of a sequence.
  static constexpr bool kPacked = kRowTiles == 1;
  static_assert(kRing % 2 == 1);  // so a slot with a tile of K next gets a tile of K; the same for V
};

template <class C>
struct WarpMemory {
  union {
    Tile<typename C::In, kWarpKeys, C::kHeadDim> ring[C::kRing];
    float out[C::kRows][C::kHeadDim + 8];  // used at the end; rows start in different banks
  };
  float max[C::kRows], sum[C::kRows];
};

template <class C>
struct DecodeMemory {
  Tile<typename C::In, C::kRows, C::kHeadDim> q;
  WarpMemory<C> warps[kDecodeWarps];
};

// A query row of one of the heads that share a key head.
struct QueryRow {
  bool inside;
  int head, query;
};

// The rows of a block, of all heads of a group, head after head. In 32 bits, to save registers.
struct QueryRows {
  int b, first_head, first, count;

  __device__ QueryRow operator()(const Sizes& z, int n) const {
    const auto row = static_cast<uint32_t>(first + n), length = static_cast<uint32_t>(z.seqlen_q);
    return {n < count, first_head + static_cast<int>(row / length), static_cast<int>(row % length)};
  }
};

// The query and key of a thread's elements of the warp's 16 x 16 scores: element e of accumulator n.
struct DecodePlace {
  int64_t b;
  const QueryRow (&rows)[2];
  int64_t j0, end;

  __device__ int64_t batch() const { return b; }
  __device__ int64_t head(int e) const { return rows[e / 2].head; }
  __device__ int64_t query(int e) const { return rows[e / 2].query; }
  __device__ int64_t key(int n, int e) const { return j0 + 8 * n + lane() % 4 * 2 + e % 2; }
  __device__ bool inside(int n, int e) const { return rows[e / 2].inside && key(n, e) < end; }
  __device__ int64_t end_key(int r) const { return rows[r].inside ? end : 0; }
  __device__ bool shows(int, int) const { return true; }
};

// Streams the tiles of K or V that a warp reads. A lane copies the same chunk of every kStep-th row.
template <class C>
struct TileStream {
  using In = typename C::In;
  static constexpr int kChunks = C::kHeadDim / kChunk, kStep = 32 / kChunks;
  const Tensor4& tensor;
  const CacheParams& cache;
  const In* next;  // the lane's first chunk of the next tile; in pages, of row 0 of page 0
  int first_row;   // in pages: the row of key 0
  bool in_columns;

  // Starts at key `first`.
  __device__ TileStream(const AttentionParams& p, const Tensor4& t, int64_t b, int64_t h, int64_t first,
                        int64_t columns)
      : tensor(t),
        cache(p.varlen.cache),
        first_row(static_cast<int>(p.varlen.first_k)),
        in_columns(lane() % kChunks * kChunk < columns) {
    next = (in_pages() ? t.row<In>(0, h, 0) : t.row<In>(b, h, first + lane() / kChunks)) +
           lane() % kChunks * kChunk;
  }

  __device__ bool in_pages() const { return C::kPacked && cache.pages; }

  // Copies the next tile, which starts at key j0. `end`: the end of the keys.
  __device__ void load_async(Tile<In, kWarpKeys, C::kHeadDim>& tile, int64_t j0, int64_t end) {
    const int row = lane() / kChunks, keys = smaller<int64_t>(end - j0, kWarpKeys);
    const auto copy = [&](int n, const In* source) {
      const bool inside = in_columns && row + n < keys;
      ptx::cp_async_16(tile.chunk(row + n, lane() % kChunks), inside ? source : tensor.data, inside);
    };
    if (keys > 0 && in_pages()) {
      // Each lane looks up one row for the warp.
      const int64_t at = first_row + j0 + smaller<int>(lane() % kWarpKeys, keys - 1);
      const int64_t offset =
          cache.pages.page_of(at) * tensor.stride_b + at % cache.pages.page_size * tensor.stride_s;
#pragma unroll
      for (int n = 0; n < kWarpKeys; n += kStep) copy(n, next + __shfl_sync(0xffffffffu, offset, row + n));
    } else if (keys > 0) {
#pragma unroll
      for (int n = 0; n < kWarpKeys; n += kStep) copy(n, next + n * tensor.stride_s);
    }
    if (!in_pages()) next += kDecodeBlockKeys * tensor.stride_s;
  }
};

// Starts the copy of the block's rows of q. Rows after the last row are zeros.
template <class C>
__device__ void load_queries(const AttentionParams& p, const QueryRows& rows,
                             Tile<typename C::In, C::kRows, C::kHeadDim>& tile) {
  constexpr int kChunks = C::kHeadDim / kChunk;
  for (int e = threadIdx.x; e < C::kRows * kChunks; e += kDecodeThreads) {
    const int row = e / kChunks, n = e % kChunks;
    const QueryRow at = rows(p.sizes, row);
    const bool inside = at.inside && n * kChunk < p.sizes.head_dim;
    const auto* source = p.q.row<typename C::In>(rows.b, at.head, at.query) + n * kChunk;
    ptx::cp_async_16(tile.chunk(row, n), inside ? source : p.q.data, inside);
  }
}

// acc += Q K^T for the 16 keys of a tile.
template <class In, int kRows, int kRowTiles, int kCols>
__device__ void multiply_queries(Tile<In, kRows, kCols>& queries, Tile<In, kWarpKeys, kCols>& keys,
                                 float (&acc)[kRowTiles][2][4]) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(b, keys.chunk(lane() / 16 * 8 + lane() % 8, 2 * k + lane() / 8 % 2));
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      ptx::ldmatrix_x4(a, queries.chunk(kMmaRows * r + lane() % 16, 2 * k + lane() / 16));
      ptx::mma_m16n8k16<In>(acc[r][0], a, b[0], b[1]);
      ptx::mma_m16n8k16<In>(acc[r][1], a, b[2], b[3]);
    }
  }
}

// Drops elements of P. The factor of kept elements is applied at the end, in fp32. The two rows of a thread can belong
// to any two queries, so one Philox call is used for two neighbouring keys of one query.
__device__ inline void drop_probs(const AttentionParams& p, const DecodePlace& at, float (&probs)[2][4]) {
  const PhiloxKey key = dropout_key(p.dropout);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const PhiloxWords words =
          dropout_words(key, at.b * p.sizes.heads + at.head(e), at.query(e), at.key(n, e));
      const bool lower = dropout_word_index(at.query(e), at.key(n, e)) == 2;
      if ((lower ? words.w[2] : words.w[0]) < p.dropout.threshold) probs[n][e] = 0;
      if ((lower ? words.w[3] : words.w[1]) < p.dropout.threshold) probs[n][e + 1] = 0;
    }
}

// For a warp and its tile: adds the value rows with Inf or NaN by add_non_finite_rows(), then sets them to zero.
template <class In, int kRowTiles, int kCols>
__device__ void take_out_non_finite_rows(float (&probs)[kRowTiles][2][4],
                                         const uint32_t (&attends)[kRowTiles],
                                         Tile<In, kWarpKeys, kCols>& values,
                                         float (&acc)[kRowTiles][kCols / 8][4]) {
  const int my_row = lane() / 2;  // two lanes read a row, each every second chunk
  bool mine = false;
  for (int n = lane() % 2; n < kCols / kChunk; n += 2) mine |= has_non_finite(values.chunk(my_row, n));
  const uint32_t found = __ballot_sync(0xffffffffu, mine);
  if (found == 0) return;
  const auto is_finite = [&](int row) { return (found >> 2 * row & 3) == 0; };
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
    add_non_finite_rows(probs[r], AttendingBits<>{attends[r]}, values, is_finite, acc[r]);
  __syncwarp();  // all lanes have read the rows
  if (!is_finite(my_row))
    for (int n = lane() % 2; n < kCols / kChunk; n += 2)
      *reinterpret_cast<uint4*>(values.chunk(my_row, n)) = make_uint4(0, 0, 0, 0);
  __syncwarp();  // publishes the zeros to the warp
}

// Writes the (m, l, O) of one of the warp's row tiles to shared memory, where the warps are merged.
template <class C>
__device__ void store_results(const RowStatistics& statistics, const float (&out)[C::kHeadDim / 8][4],
                              float to_score, int first_row, int count, WarpMemory<C>& mine) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane() / 4 + 8 * r;
    const float sum = total_of_lanes<kRowLanes>(statistics.sum[r]);
    if (row >= count) continue;
    if (lane() % 4 == 0) mine.max[row] = statistics.max[r] * to_score, mine.sum[row] = sum;
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n)
      *reinterpret_cast<float2*>(&mine.out[row][8 * n + lane() % 4 * 2]) =
          make_float2(out[n][2 * r], out[n][2 * r + 1]);
  }
}

// Merges the warps and writes the rows: results for one split, otherwise parts that combine.cu merges.
template <class C>
__device__ void finish_block(const AttentionParams& p, const DecodeMemory<C>& shared, const QueryRows& rows,
                             int64_t splits, const Partials<float>& partials) {
  using In = typename C::In;
  const Sizes& z = p.sizes;
  const int pairs = static_cast<int>(z.head_dim_v / 2);
  const float keep_scale = p.dropout ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
  for (int e = threadIdx.x; e < rows.count * pairs; e += kDecodeThreads) {
    const int row = e / pairs, col = e % pairs * 2;
    float max = -kInf<float>, sum = 0, first = 0, second = 0;
    for (const WarpMemory<C>& warp : shared.warps) max = larger(max, warp.max[row]);
    const float reference = max == -kInf<float> ? 0.0f : max;
#pragma unroll
    for (const WarpMemory<C>& warp : shared.warps) {
      const float factor = ptx::exp2_fast((warp.max[row] - reference) * static_cast<float>(kLog2E));
      sum += warp.sum[row] * factor;
      first += warp.out[row][col] * factor;
      second += warp.out[row][col + 1] * factor;
    }

    const QueryRow at = rows(z, row);
    const int64_t out_row = p.lse_index(rows.b, at.head, at.query);
    if (splits == 1) {
      const RowResult<float> result = finish_row(p, rows.b, at.head, max, sum);
      const float factor = result.out_factor * keep_scale;
      *reinterpret_cast<uint32_t*>(p.out.row<In>(rows.b, at.head, at.query) + col) =
          ptx::pack<In>(first * factor, second * factor);
      if (col == 0) static_cast<float*>(p.lse)[out_row] = result.lse;
    } else {
      const int64_t partial_row = blockIdx.z * p.lse_size() + out_row;
      *reinterpret_cast<float2*>(partials.out + partial_row * z.head_dim_v + col) =
          make_float2(first * keep_scale, second * keep_scale);
      if (col == 0) partials.row_max[partial_row] = max, partials.row_sum[partial_row] = sum;
    }
  }
}

// The keys of the block. A packed sequence has at most the keys of the longest sequence.
template <class C>
__device__ Range keys_of_split(const AttentionParams& p, const DecodeSchedule& schedule) {
  const int64_t begin = schedule.keys.begin + blockIdx.z * schedule.keys_per_split;
  const int64_t end = smaller(begin + schedule.keys_per_split, schedule.keys.end);
  if (!C::kPacked || !p.varlen) return {begin, end};
  const Range own = visible_keys(p.band.without_chunks(), 0, p.sizes.seqlen_q, p.sizes.seqlen_k);
  return {larger<int64_t>(begin, own.begin / kWarpKeys * kWarpKeys), smaller(end, own.end)};
}

template <class C>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_kernel(const AttentionParams call, const DecodeSchedule schedule, const Partials<float> partials) {
  if (!C::Gpu::kHasCode) return __trap();
  auto& shared = shared_memory<DecodeMemory<C>, C::Gpu::kSharedBytes>();
  WarpMemory<C>& mine = shared.warps[warp()];

  // The part of this block. Row blocks with the same keys are neighbours, so that they run at the same time.
  const auto row_blocks = static_cast<int>(schedule.row_blocks),
             heads_kv = static_cast<int>(call.sizes.heads_kv);
  const auto group = static_cast<int>(schedule.group), task = static_cast<int>(blockIdx.x);
  const int b = task / row_blocks / heads_kv, h_kv = task / row_blocks % heads_kv;
  const int first_row = task % row_blocks * C::kRows;
  const AttentionParams& p = call_of_block<C>(call, b);
  const Sizes& z = p.sizes;
  const auto rows_left = static_cast<int>(group * z.seqlen_q - first_row);
  if (rows_left <= 0) return;  // the sequence ends before these rows
  const QueryRows block_rows{b, h_kv * group, first_row, smaller(rows_left, C::kRows)};
  QueryRow rows[C::kRowTiles][2];
#pragma unroll
  for (int n = 0; n < 2 * C::kRowTiles; ++n) rows[n / 2][n % 2] = block_rows(z, lane() / 4 + 8 * n);
  const Range split = keys_of_split<C>(p, schedule);
  const int64_t end = split.end, first = split.begin + warp() * kWarpKeys;

  TileStream<C> k(p, p.k, b, h_kv, first, z.head_dim), v(p, p.v, b, h_kv, first, z.head_dim_v);
  const auto start_copy = [&](TileStream<C>& stream, int slot, int64_t j0) {
    stream.load_async(mine.ring[slot], j0, end);
    ptx::cp_async_commit();  // ends the group of a tile; also an empty one, because the waits count groups
  };
  constexpr int kAhead = C::kRing / 2;  // tiles of K in flight, and as many of V
  int slot = 0;
  // Waits for the stream's tile of keys from j0 on. Starts the copy of the tile kAhead later, into the slot of the last
  // tile. This slot is free: mma.sync is one instruction of the whole warp, so all lanes have finished the last tile's
  // products.
  const auto take = [&](TileStream<C>& stream, int64_t j0) -> auto& {
    ptx::cp_async_wait<C::kRing - 2>();  // this lane's part of the tile has landed
    __syncwarp();                        // the parts of all lanes have landed
    start_copy(stream, slot == 0 ? C::kRing - 1 : slot - 1, j0 + kAhead * kDecodeBlockKeys);
    auto& tile = mine.ring[slot];
    slot = slot == C::kRing - 1 ? 0 : slot + 1;
    return tile;
  };

  load_queries<C>(p, block_rows, shared.q);
  ptx::cp_async_commit();  // ends the group of q
#pragma unroll
  for (int n = 0; n < kAhead; ++n) {
    start_copy(k, 2 * n, first + n * kDecodeBlockKeys);
    start_copy(v, 2 * n + 1, first + n * kDecodeBlockKeys);
  }
  ptx::cp_async_wait<2 * kAhead>();  // this thread's part of q has landed
  __syncthreads();                   // the parts of all threads have landed

  const ScoreScale scale(p);
  RowStatistics statistics[C::kRowTiles];
  float out[C::kRowTiles][C::kHeadDim / 8][4] = {};
  for (int64_t j0 = first; j0 < end; j0 += kDecodeBlockKeys) {
    const int64_t j_end = smaller(j0 + kWarpKeys, end);
    const bool hides =
        p.mask || !band_covers(p.band.without_chunks(), 0, z.seqlen_q, j0, j_end);  // one of its keys

    float scores[C::kRowTiles][2][4] = {};
    uint32_t attends[C::kRowTiles];
    multiply_queries(shared.q, take(k, j0), scores);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const DecodePlace at{b, rows[r], j0, end};
      attends[r] = finish_scores(p, scale, at, hides || j_end < j0 + kWarpKeys, scores[r]);
      float factor[2];
      statistics[r].update(scale, scores[r], factor);
      if (p.dropout) drop_probs(p, at, scores[r]);  // after the row sum: dropout applies to the normalised P
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[r][n][e] *= factor[e / 2];
    }

    auto& values = take(v, j0);
    if (hides) take_out_non_finite_rows(scores, attends, values, out);
    multiply_probs(scores, values, out);
  }

#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r)
    store_results(statistics[r], out[r], scale.to_score(), kMmaRows * r, block_rows.count, mine);
  __syncthreads();  // the results of all warps are in shared memory
  finish_block(p, shared, block_rows, schedule.splits, partials);
}

template <class C>
cudaError_t launch_decode_padded(const AttentionParams& p, const DecodeSchedule& schedule,
                                 const Partials<float>& partials, cudaStream_t stream) {
  const LaunchShape shape{schedule.tasks, 1, schedule.splits, kDecodeThreads, sizeof(DecodeMemory<C>)};
  return launch(decode_kernel<C>, shape, stream, p, schedule, partials);
}

// Shared memory: 44 to 80 KB, so two blocks fit an A100's multiprocessor, two or more an H100's. On compute capability 7.5
// 21 to 41 KB: a longer ring would serve copies that land later.
template <class In, class Gpu = Ampere>
cudaError_t launch_decode(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  constexpr bool kTuring = std::is_same_v<Gpu, Turing>;
  constexpr int kRing64 = kTuring ? 3 : 7, kRing128 = kTuring ? 3 : 5;
  const DecodeSchedule schedule = schedule_decode(p, Gpu::kWidestPair);
  const Partials<float> partials(workspace, p, schedule.splits);
  const int64_t widest = std::max(p.sizes.head_dim, p.sizes.head_dim_v);
  const bool one = schedule.row_tiles == 1;
  auto attend = widest > 64 ? launch_decode_padded<DecodeConfig<In, 128, 1, kRing128, Gpu>>
                : one       ? launch_decode_padded<DecodeConfig<In, 64, 1, kRing64, Gpu>>
                            : launch_decode_padded<DecodeConfig<In, 64, 2, kRing64, Gpu>>;
  if constexpr (!kTuring) {
    if (widest > 64 && !one) attend = launch_decode_padded<DecodeConfig<In, 128, 2, kRing128>>;
    if (widest > 128) attend = launch_decode_padded<DecodeConfig<In, 256, 1, 3>>;
  }
  return in_order([&] { return attend(p, schedule, partials, stream); },
                  [&] { return launch_combine(p, schedule.splits, workspace, stream); });
}

}  // namespace flash_attn_ext::cuda::sm80
