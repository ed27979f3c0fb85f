// Forward on tensor cores: FlashAttention-2, algorithm 1. A block has 128 query rows of a head, a warp 16 of them.
// cp.async loads K and V during the products of other tiles.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../core/splits.h"
#include "../call_of_block.cuh"
#include "../device.h"
#include "../launch.h"
#include "../shared_memory.h"
#include "gpu.h"
#include "sm80.h"
#include "softmax.cuh"
#include "staged_copies.cuh"
#include "tile_copies.cuh"
#include "tile_functions.cuh"

namespace flash_attn_ext::cuda::sm80 {

// A plain kernel computes calls with is_plain(). So its registers suffice for 32 query rows of a warp, up to a head
// dimension of 128. Then each part of K and V that a warp reads from shared memory serves two products.
template <class In_, int kHeadDim_, int kBlockK_, int kBuffers_, bool kPacked_ = false, class Gpu_ = Ampere,
          bool kPlain_ = false>
struct Config {
  using In = In_;
  using Gpu = Gpu_;
  static constexpr int kHeadDim =
      kHeadDim_;  // of q, k, v and out; smaller head dimensions are padded with zeros
  static constexpr bool kPlain = kPlain_;
  static constexpr int kRowTiles = kPlain && kHeadDim <= 128 ? 2 : 1;  // of 16 query rows, in a warp
  static constexpr int kWarps = 8 / kRowTiles, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kRowTiles;  // of a multiprocessor, at least
  static constexpr int kBlockQ = 16 * kRowTiles * kWarps, kBlockK = kBlockK_;
  static constexpr int kBuffers = kBuffers_;  // buffers of K, and buffers of V
  static constexpr bool kPacked = kPacked_;   // computes packed sequences and caches only
};

template <class C>
struct SharedMemory {
  Tile<typename C::In, C::kBlockQ, C::kHeadDim> q;
  Tile<typename C::In, C::kBlockK, C::kHeadDim> k[C::kBuffers], v[C::kBuffers];
  int row_is_finite[C::kBlockK];  // rows of v; set by take_out_non_finite_rows()
};

// The query and key of a thread's elements of a row tile's scores: element e of accumulator n.
struct ScorePosition {
  const Sizes& sizes;
  int64_t b, h;
  int i0, j0;
  int row = 16 * warp();  // the row tile's first row in the block

  __device__ int64_t batch() const { return b; }
  __device__ int64_t head(int) const { return h; }
  __device__ int query(int e) const { return i0 + row + static_cast<int>(lane()) / 4 + e / 2 * 8; }
  __device__ int key(int n, int e) const { return j0 + 8 * n + static_cast<int>(lane()) % 4 * 2 + e % 2; }
  __device__ bool inside(int n, int e) const {
    return query(e) < sizes.seqlen_q && key(n, e) < sizes.seqlen_k;
  }
  __device__ int64_t end_key(int r) const { return query(2 * r) < sizes.seqlen_q ? sizes.seqlen_k : 0; }
  __device__ bool shows(int, int) const { return true; }
  __device__ ElementIndex element(int n, int e) const { return {b, h, query(e), key(n, e)}; }
};

// The position of row tile m of the warp.
template <class C, class Position>
__device__ Position of_row_tile(Position at, int m) {
  if constexpr (C::kRowTiles > 1) at.row = 16 * (C::kRowTiles * warp() + m);
  return at;
}

// The query rows of a block, of one head. The last rows of a head are first, because in a causal call they take
// longest.
template <class C>
struct QueryBlock {
  int64_t head, b, h;
  int i0;

  __device__ QueryBlock(const Sizes& z, int64_t query_blocks)
      : head(blockIdx.x / query_blocks),
        b(head / z.heads),
        h(head % z.heads),
        i0(static_cast<int>(query_blocks - 1 - blockIdx.x % query_blocks) * C::kBlockQ) {}
};

// The keys that some query of a block from i0 on sees, from the start of a tile on.
template <class C>
__device__ Range key_tiles(const AttentionParams& p, int64_t i0) {
  const int64_t i_end = smaller<int64_t>(i0 + C::kBlockQ, p.sizes.seqlen_q);
  const Range seen = visible_keys(p.band.without_chunks(), i0, i_end, p.sizes.seqlen_k);
  return {seen.begin / C::kBlockK * C::kBlockK, seen.end};
}

// Whether the tile may have hidden elements.
template <class C>
__device__ bool is_partial(const AttentionParams& p, const ScorePosition& at) {
  const int64_t i_end = smaller<int64_t>(at.i0 + C::kBlockQ, p.sizes.seqlen_q);
  const int64_t j_end = smaller<int64_t>(at.j0 + C::kBlockK, p.sizes.seqlen_k);
  const bool tail = j_end < at.j0 + C::kBlockK;
  return (!C::kPlain && p.mask) || tail || !band_covers(p.band.without_chunks(), at.i0, i_end, at.j0, j_end);
}

// Drops elements of P, and of the tangents' tile if there is one. The factor of kept elements is applied at the end, in
// fp32. One Philox call is enough for a thread's four elements of an accumulator (core/philox.h).
template <int N, class... Weights>
__device__ void drop_probs(const AttentionParams& p, PhiloxKey key, const ScorePosition& at,
                           int64_t head_index, float (&probs)[N][4], Weights&... weights) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const PhiloxWords words = dropout_words(key, head_index, at.query(0), at.key(n, 0));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (words.w[e] >= p.dropout.threshold) continue;
      probs[n][e] = 0;
      ((weights[n][e] = 0), ...);
    }
  }
}

// Whether an element of the tile is Inf or NaN. Each thread of the block reads a part.
template <class C, class ValueTile>
__device__ bool has_non_finite(const ValueTile& tile) {
  bool found = false;
  for (int e = threadIdx.x; e < C::kBlockK * C::kHeadDim / kChunk; e += C::kThreads)
    found |= has_non_finite(tile.elements + e * kChunk);
  return __syncthreads_or(found);  // one answer for all threads, because they branch on it
}

// For the block: calls `add`, which adds the value rows with Inf or NaN by add_non_finite_rows(), then sets these rows
// to zero.
template <class C, class ValueTile, class Add>
__device__ void take_out_non_finite_rows(ValueTile& values, SharedMemory<C>& shared, const Add& add) {
  if (!has_non_finite<C>(values)) return;
  if (threadIdx.x < C::kBlockK) {
    bool finite = true;
    for (int col = 0; col < C::kHeadDim; ++col) finite &= std::isfinite(widen(values.at(threadIdx.x, col)));
    shared.row_is_finite[threadIdx.x] = finite;
  }
  __syncthreads();  // publishes row_is_finite to all threads
  add([&](int row) { return shared.row_is_finite[row] != 0; });
  __syncthreads();  // all threads have read the rows
  for (int e = threadIdx.x; e < C::kBlockK * C::kHeadDim; e += C::kThreads)
    if (!shared.row_is_finite[e / C::kHeadDim]) values.elements[e] = round_to<typename C::In>(0.0f);
  __syncthreads();  // publishes the zeros to all threads
}

// Writes a thread's elements of its row r, in existing columns.
template <class In, int N>
__device__ void store_row(In* row, int64_t columns, int r, float factor, const float (&acc)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t col = 8 * n + lane() % 4 * 2;
    if (col < columns)
      *reinterpret_cast<uint32_t*>(row + col) =
          ptx::pack<In>(acc[n][2 * r] * factor, acc[n][2 * r + 1] * factor);
  }
}

template <class C, class Functions = NoFunctions>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    forward_kernel(const AttentionParams call, int64_t query_blocks, const Functions functions) {
  using In = typename C::In;
  if (!C::Gpu::kHasCode) return __trap();
  auto& shared = shared_memory<SharedMemory<C>, C::Gpu::kSharedBytes>();
  const QueryBlock<C> block(call.sizes, query_blocks);
  const int64_t b = block.b, h = block.h;
  const int i0 = block.i0;
  const AttentionParams& p = call_of_block<C>(call, b);
  const Sizes& z = p.sizes;
  if (i0 >= z.seqlen_q) return;  // the sequence ends before these rows
  const int64_t h_kv = z.kv_head(h);
  const Range keys = key_tiles<C>(p, i0);
  const int end = static_cast<int>(keys.end);
  const PhiloxKey key = dropout_key(p.dropout);

  const int64_t batch_of_rows =
      C::kPacked && !Functions::kAlsoDense ? 0 : b;  // the tensors of a sequence start at its first row
  const auto load = [&](auto& tile, const Tensor4& t, int64_t head, int64_t first, int64_t seqlen,
                        int64_t columns) {
    tile.template load_async<C::kThreads>(t, batch_of_rows, head, first, seqlen, columns);
  };
  const auto load_k = [&](int j0, int buffer) {
    load(shared.k[buffer], p.k, h_kv, j0, z.seqlen_k, z.head_dim);
  };
  const auto load_v = [&](int j0, int buffer) {
    load(shared.v[buffer], p.v, h_kv, j0, z.seqlen_k, z.head_dim_v);
  };
  const auto fetch_k = [&](int j0, auto& staged) {
    staged.fetch(p.k, batch_of_rows, h_kv, j0, z.seqlen_k, z.head_dim);
  };
  const auto fetch_v = [&](int j0, auto& staged) {
    staged.fetch(p.v, batch_of_rows, h_kv, j0, z.seqlen_k, z.head_dim_v);
  };
  auto copies = [&] {
    if constexpr (C::Gpu::kAsyncCopies) {
      return copies_of<C>(load_k, load_v, end);
    } else {
      return staged_copies_of<C>(fetch_k, fetch_v, shared.k[0], shared.v[0], end);
    }
  }();
  auto tiles = functions.template tiles<C>(p, b, h, i0, keys);
  auto tile = tiles.first();
  // Without keys, no thread waits for q.
  if ((tile.j0) < end) load(shared.q, p.q, h, i0, z.seqlen_q, z.head_dim);
  copies.start(tile.j0);

  const ScoreScale scale = C::kPlain ? ScoreScale::in_exponent(p) : ScoreScale(p, functions.changes_scores());
  constexpr int kRowTiles = C::kRowTiles;
  RowStatistics statistics[kRowTiles];
  float out[kRowTiles][C::kHeadDim / 8][4] = {};
  int buffer = 0;
  for (; (tile.j0) < end; buffer ^= C::kBuffers - 1) {
    const auto at = functions.template shown<C::kBlockK / 8>(p, tile, ScorePosition{z, b, h, i0, tile.j0});
    const bool partial = is_partial<C>(p, at) || functions.may_hide(tile);
    const auto next = tiles.after(tile);

    copies.wait_for_k(tile.j0, next.j0, buffer);
    float scores[kRowTiles][C::kBlockK / 8][4] = {};
    multiply_rows(shared.q, shared.k[buffer], scores);
    uint32_t attends[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const auto here = of_row_tile<C>(at, m);
      if constexpr (!C::kPlain)
        attends[m] = finish_scores(p, scale, here, partial, scores[m]);
      else if (partial)
        hide_outside_band(p.band.without_chunks(), here, scores[m], [](int, int, bool) {});
      functions.change_scores(p, here, scores[m], attends[m]);
      float factor[2];
      statistics[m].update(scale, scores[m], factor);
      // After the row sum: dropout applies to the normalised P.
      if (!C::kPlain && p.dropout) drop_probs(p, key, here, block.head, scores[m]);
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[e / 2];
    }

    copies.wait_for_v(next.j0, buffer);
    auto& values = shared.v[buffer];
    if (partial)
      take_out_non_finite_rows(values, shared, [&](const auto& is_finite) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const auto here = of_row_tile<C>(at, m);
          if constexpr (C::kPlain)
            add_non_finite_rows(scores[m], attending_in_band<C::kBlockK / 8>(p.band.without_chunks(), here),
                                values, is_finite, out[m]);
          else
            add_non_finite_rows(scores[m], AttendingBits<>{attends[m]}, values, is_finite, out[m]);
        }
      });
    multiply_probs(scores, values, out);
    tile = next;
  }

  // Computes the params again, because the loop has too few registers to keep them.
  const AttentionParams& results = call_of_block<C>(call, b);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const auto at_end = of_row_tile<C>(ScorePosition{results.sizes, b, h, i0, 0}, m);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowResult<float> result = finish_row(p, b, h, statistics[m].max[r] * scale.to_score(),
                                                 total_of_lanes<kRowLanes>(statistics[m].sum[r]));
      const float out_factor =
          result.out_factor * (!C::kPlain && p.dropout ? static_cast<float>(p.dropout.keep_scale) : 1.0f);
      const int64_t i = at_end.query(2 * r);
      if (i >= results.sizes.seqlen_q) continue;
      if (lane() % 4 == 0) static_cast<float*>(p.lse)[results.lse_index(b, h, i)] = result.lse;
      store_row(results.out.row<In>(batch_of_rows, h, i), z.head_dim_v, r, out_factor, out[m]);
    }
  }
}

template <class C, class Functions = NoFunctions>
cudaError_t launch_padded(const AttentionParams& p, cudaStream_t stream, const Functions& functions = {}) {
  const Sizes& z = p.sizes;
  const int64_t query_blocks = ceil_div(z.seqlen_q, C::kBlockQ);
  const LaunchShape shape{z.batch * z.heads * query_blocks, 1, 1, C::kThreads, sizeof(SharedMemory<C>)};
  return launch(forward_kernel<C, Functions>, shape, stream, p, query_blocks, functions);
}

// The kernel of plain calls of a padded head dimension. Up to 128, two blocks share a multiprocessor, so one block computes
// while the other waits. `large`: the GPU has 163 KB of shared memory. The other GPUs, such as an RTX 4090 or an L4, have
// 100 KB, so a tile has fewer keys.
template <class In, bool kPacked>
cudaError_t launch_plain(const AttentionParams& p, int64_t widest, bool large, cudaStream_t stream) {
  if (widest <= 64) return launch_padded<Config<In, 64, 128, 1, kPacked, Ampere, true>>(p, stream);  // 48 KB
  if (widest <= 128)
    return large ? launch_padded<Config<In, 128, 64, 1, kPacked, Ampere, true>>(p, stream)   // 64 KB
                 : launch_padded<Config<In, 128, 32, 1, kPacked, Ampere, true>>(p, stream);  // 48 KB
  return launch_padded<Config<In, 256, 64, 1, kPacked, LargeAmpere, true>>(p, stream);       // 128 KB
}

// Each config needs at most 99 KB, the limit of GPUs of compute capability 8.6 and 8.9. All have 128 queries, so K and
// V are read from L2 once for 128 queries. Two of the eight warps share a scheduler, so the softmax of one overlaps
// with the products of the other.
template <class In, bool kPacked, class Gpu>
cudaError_t launch_forward_of(const AttentionParams& p, cudaStream_t stream) {
  const int64_t widest = std::max(p.sizes.head_dim, p.sizes.head_dim_v);
  if constexpr (std::is_same_v<Gpu, Turing>) {  // 32 and 48 KB of 64
    return widest <= 64 ? launch_padded<Config<In, 64, 64, 1, kPacked, Gpu>>(p, stream)
                        : launch_padded<Config<In, 128, 32, 1, kPacked, Gpu>>(p, stream);
  } else {
    if (is_plain(p) && (widest <= 128 || widest > 192)) {
      const bool large = shared_bytes_of_multiprocessor() > kLargeSharedBytes;
      if (widest <= 128 || large) return launch_plain<In, kPacked>(p, widest, large, stream);
    }
    if (widest <= 64) return launch_padded<Config<In, 64, 64, 2, kPacked>>(p, stream);    // 48 KB
    if (widest <= 128) return launch_padded<Config<In, 128, 64, 2, kPacked>>(p, stream);  // 96 KB
    if (widest <= 192) return launch_padded<Config<In, 192, 32, 2, kPacked>>(p, stream);  // 96 KB: fewer keys
    // 96 KB, in one buffer. Packed sequences have two buffers of 16 keys, because there are too few registers for 32.
    return launch_padded<std::conditional_t<kPacked, Config<In, 256, 16, 2, true>, Config<In, 256, 32, 1>>>(
        p, stream);
  }
}

template <class In, class Gpu = Ampere>
cudaError_t launch_forward(const AttentionParams& p, cudaStream_t stream) {
  return p.varlen ? launch_forward_of<In, true, Gpu>(p, stream)
                  : launch_forward_of<In, false, Gpu>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm80
