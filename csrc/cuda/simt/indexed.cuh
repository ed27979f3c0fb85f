// Forward of attention by index. A block has one query row of one key head. The rows of its tile are query heads that
// share the key head, and the columns are 64 keys of the row's list. The loop is the loop of forward.cuh.
#pragma once

#include "forward.cuh"
#include "key_lists.h"

namespace flash_attn_ext::cuda::simt {

constexpr int kHeadRows = 1, kTileHeads = kSide * kHeadRows;  // heads of a thread and of a tile

template <class T>
struct IndexedMemory : SharedMemory<T, kTileHeads> {
  int64_t keys[kBlockK];  // the keys of the tile; -1: no key
};

// The part of a block: heads [first_head, first_head + count) of one query row.
struct HeadTile {
  int64_t b, h_kv, i, first_head;
  int count;

  static __device__ HeadTile of_block(const Sizes& z) {
    const int64_t group = z.heads / z.heads_kv, tiles = ceil_div(group, kTileHeads);
    const int64_t row = blockIdx.x / tiles, first = blockIdx.x % tiles * kTileHeads, head = row / z.seqlen_q;
    return {head / z.heads_kv, head % z.heads_kv, row % z.seqlen_q, head % z.heads_kv * group + first,
            static_cast<int>(smaller<int64_t>(group - first, kTileHeads))};
  }
  static int64_t blocks(const Sizes& z) {
    if (z.heads_kv == 0) return 0;
    return z.batch * z.heads_kv * z.seqlen_q * ceil_div(z.heads / z.heads_kv, kTileHeads);
  }

  __device__ int64_t head(int row) const { return first_head + row; }
  // Row n of t is head n.
  template <class In>
  __device__ Rows<In> rows(const Tensor4& t) const {
    return {t.row<In>(b, first_head, i), t.stride_h, count};
  }
};

// The keys of a query row, in tiles of kBlockK.
struct NamedKeys {
  const int32_t* entries;
  int64_t count, block_size;  // count: keys of all blocks, also keys past the end

  __device__ NamedKeys(const KeyLists& lists, int64_t b, int64_t h_kv, int64_t i)
      : block_size(lists.indices.block_size) {
    const int64_t at = lists.indices.row(b, h_kv, i);
    entries = lists.entries + at;
    count = lists.indices.count == 0 ? 0 : lists.lengths[at / lists.indices.count] * block_size;
  }

  // Writes the keys of the tile that begins at number n0. Returns their count. The first barrier of add_row_products()
  // publishes them; it has one, because D is at least 1.
  template <class Memory>
  __device__ int load(Memory& shared, int64_t n0, int64_t seqlen_k) const {
    __syncthreads();  // all threads have read the last keys
    for (int n = threadIdx.x; n < kBlockK; n += kThreads) {
      const int64_t at = n0 + n;
      const int64_t key = at < count ? entries[at / block_size] * block_size + at % block_size : seqlen_k;
      shared.keys[n] = key < seqlen_k ? key : -1;
    }
    return static_cast<int>(smaller<int64_t>(count - n0, kBlockK));
  }
};

// The rows of the tile's keys, of keys or of values.
template <class In>
struct GatheredRows {
  const In* first;
  int64_t stride;
  const int64_t* keys;
  int64_t count;

  __device__ GatheredRows(const Tensor4& t, const HeadTile& tile, const int64_t* keys, int count)
      : first(t.row<In>(tile.b, tile.h_kv, 0)), stride(t.stride_s), keys(keys), count(count) {}
  __device__ const In* operator()(int n) const {
    return n < count && keys[n] >= 0 ? first + keys[n] * stride : nullptr;
  }
};

// Replaces the tile's products in shared.weights by scores. Bit c of the result: element c of the thread attends.
template <class T, class Memory>
__device__ uint32_t finish_gathered_scores(const AttentionParams& p, const HeadTile& tile, Memory& shared) {
  uint32_t attends = 0;
  const TileChunks chunks(p.band, tile.i);
#pragma unroll 1
  for (int e = 0; e < kHeadRows * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    const int64_t key = shared.keys[col];
    const bool inside = row < tile.count && key >= 0;
    const Score<T> score =
        finish_score(p, chunks, shared.weights[row][col], tile.b, tile.head(row), tile.i, key, inside);
    shared.weights[row][col] = score.value;
    attends |= uint32_t{score.attends} << e;
  }
  return attends;
}

// Multiplies the tile's P by dropout's factors.
template <class T, class Memory>
__device__ void drop_gathered_probs(const AttentionParams& p, const HeadTile& tile, Memory& shared) {
  const PhiloxKey key = dropout_key(p.dropout);
#pragma unroll 1
  for (int e = 0; e < kHeadRows * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    shared.weights[row][col] *= dropout_factor<T>(p, key, tile.b, tile.head(row), tile.i, shared.keys[col]);
  }
}

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1) indexed_kernel(const IndexedParams p, const KeyLists lists) {
  constexpr int kSliceCols = kMaxSlice / kSide;
  auto& shared = shared_memory<IndexedMemory<T>>();
  const Sizes& z = p.sizes;
  const HeadTile tile = HeadTile::of_block(z);
  const NamedKeys named(lists, tile.b, tile.h_kv, tile.i);
  const int64_t first_col = int64_t{blockIdx.y} * kMaxSlice;

  RowStatistics<T, kHeadRows> statistics;
  T out[kHeadRows][kSliceCols] = {};
  for (int64_t n0 = 0; n0 < named.count; n0 += kBlockK) {
    const int count = named.load(shared, n0, z.seqlen_k);
    T products[kHeadRows][kCols] = {}, factor[kHeadRows];
    add_row_products(shared, tile.rows<In>(p.q), GatheredRows<In>(p.k, tile, shared.keys, count), z.head_dim,
                     products);
    store_elements(products, shared.weights);
    const uint32_t attends = finish_gathered_scores<T>(p, tile, shared);
    statistics.update(shared.weights, attends, factor);
    if (p.dropout) drop_gathered_probs<T>(p, tile, shared);  // after the row sum, as in forward.cuh
#pragma unroll
    for (int c = 0; c < kSliceCols; ++c) out[0][c] *= factor[0];
    add_weighted_rows<false>(shared, shared.weights, GatheredRows<In>(p.v, tile, shared.keys, count),
                             first_col, z.head_dim_v, true, out);
  }

  const int row = tile_row(0);
  const T sum = row_total(statistics.sum[0]);
  if (row >= tile.count) return;
  const int64_t h = tile.head(row);
  const RowResult<T> result = finish_row(p, tile.b, h, statistics.max[0], sum);
  if (thread_x() == 0 && blockIdx.y == 0) static_cast<T*>(p.lse)[p.lse_index(tile.b, h, tile.i)] = result.lse;
#pragma unroll
  for (int c = 0; c < kSliceCols; ++c) {
    const int64_t col = first_col + tile_col(c);
    if (col < z.head_dim_v)
      p.out.row<In>(tile.b, h, tile.i)[col] = round_to<In>(out[0][c] * result.out_factor);
  }
}

template <class In>
cudaError_t launch_indexed(const IndexedParams& p, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const KeyLists lists = KeyLists::lay_out(arena, p.sizes, p.indices);
  // At least one slice, because a call with D_v 0 has an lse.
  const int64_t slices = p.sizes.head_dim_v > kMaxSlice ? ceil_div(p.sizes.head_dim_v, kMaxSlice) : 1;
  const LaunchShape shape{HeadTile::blocks(p.sizes), slices, 1, kThreads,
                          sizeof(IndexedMemory<Accumulator<In>>)};
  return in_order([&] { return launch_sort(lists, stream); },
                  [&] { return launch(indexed_kernel<In>, shape, stream, p, lists); });
}

}  // namespace flash_attn_ext::cuda::simt
