// Forward mode: out, lse and their tangents in one kernel (docs/derivative_formulas.md). A block has some query rows
// and a slice of the D_v columns. It is the forward's loop with two more sums, which are rescaled in the same way:
//
//   e  = tangent of S      mu' = mu + rowsum(P o (e - mu)) / l
//   tO = (tO - (mu' - mu) O) e^(m - m') + (P o (e - mu')) V + P tV
//   at the end t_lse = mu and t_out = tO / l
//
// tO is relative to the mean mu of e so far. Without the subtraction, a large mean would remove the low digits of e.
#pragma once

#include "../tangents.cuh"
#include "forward.cuh"

namespace flash_attn_ext::cuda::simt {

// Query rows of a thread. Registers hold two results, so in fp64 a thread has half of the rows.
template <class T>
constexpr int jvp_rows() {
  return sizeof(T) == sizeof(double) ? kRows / 2 : kRows;
}

template <class T, int R = jvp_rows<T>()>
struct JvpMemory : SharedMemory<T, kSide * R> {
  ScoreTile<T, kSide * R> t_weights;  // w, then e, then P o (e - mu)
};
static_assert(sizeof(JvpMemory<float>) <= (48 << 10), "runs on every GPU without opting in");
static_assert(sizeof(JvpMemory<double>) <= kTuringSharedBytes);

// Converts the thread's products to scores and their tangents, in place. Bit 4 r + c of the result: that element
// attends.
template <class T, class Tile>
__device__ uint32_t finish_scores_and_tangents(const JvpParams& p, const Tile& tile, int64_t j0,
                                               JvpMemory<T>& shared) {
  uint32_t attends = 0;
  const TileChunks chunks(p.band, tile.queries().begin);
#pragma unroll 1
  for (int e = 0; e < jvp_rows<T>() * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    const int64_t h = tile.head(row), i = tile.query(row), j = j0 + col;
    const bool inside = row < tile.count && j < p.sizes.seqlen_k;
    const Score<T> score = finish_score(p, chunks, shared.weights[row][col], tile.b, h, i, j, inside);
    T tangent = 0;  // 0 for every product if the element is hidden
    if (score.value != -kInf<T>)
      tangent = tangent_of(p, p.tangents, score, shared.t_weights[row][col], tile.b, h, i, j).value;
    shared.weights[row][col] = score.value;
    shared.t_weights[row][col] = tangent;
    attends |= uint32_t{score.attends} << e;
  }
  return attends;
}

// RowStatistics with the tangent. All threads of a row have all three values.
template <class T>
struct JvpStatistics {
  static constexpr int R = jvp_rows<T>();
  T max[R], sum[R], mean[R];

  // The sink is a row's first column.
  __device__ JvpStatistics(const JvpParams& p, int64_t b, int64_t h) {
    const RowSum<T> start = add_sink(p, b, h, RowSum<T>{-kInf<T>, T(0)});
    const T t_start = p.tangents.sink && start.sum != T(0) ? p.tangents.sink.of<T>(b, h) : T(0);
    for (int r = 0; r < R; ++r) max[r] = start.max, sum[r] = start.sum, mean[r] = t_start;
  }

  // Converts a tile of scores and tangents to P and P o (e - mean), and updates the statistics. The caller subtracts
  // shift[r] O from the row's sum of tO so far, and multiplies both sums by factor[r].
  __device__ void update(JvpMemory<T>& shared, uint32_t attends, T (&factor)[R], T (&shift)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      T prob[kCols], tangent[kCols], new_max = max[r];
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        new_max = larger(new_max, prob[c] = shared.weights[tile_row(r)][tile_col(c)]);
      new_max = row_maximum(new_max);
      const T reference = new_max == -kInf<T> ? T(0) : new_max;  // as in the forward
      T tile_sum = 0, mean_change = 0;
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        prob[c] = std::exp(prob[c] - reference);
        tangent[c] = shared.t_weights[tile_row(r)][tile_col(c)];
        tile_sum += prob[c];
        mean_change += prob[c] * (tangent[c] - mean[r]);
      }
      factor[r] = std::exp(max[r] - reference);
      max[r] = new_max;
      sum[r] = sum[r] * factor[r] + row_total(tile_sum);
      mean_change = row_total(mean_change);
      shift[r] = sum[r] == T(0) ? T(0) : mean_change / sum[r];
      mean[r] += shift[r];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const bool attended = attends >> (r * kCols + c) & 1;
        shared.weights[tile_row(r)][tile_col(c)] = weight_of(prob[c], attended);
        shared.t_weights[tile_row(r)][tile_col(c)] = weight_of(prob[c] * (tangent[c] - mean[r]), attended);
      }
    }
  }
};

template <class In, int kSlice, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1) jvp_kernel(const JvpParams call) {
  constexpr int R = jvp_rows<T>(), kTileRows = kSide * R, kSliceCols = kSlice / kSide;
  auto& shared = shared_memory<JvpMemory<T>>();

  // The part of this block. The last rows of a head are first, because in a causal call they take longest.
  const int64_t blocks = ceil_div(call.sizes.seqlen_q, kTileRows), head = blockIdx.x / blocks;
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads;
  const int64_t i0 = (blocks - 1 - blockIdx.x % blocks) * kTileRows, first_col = int64_t{blockIdx.y} * kSlice;
  const JvpParams p = of_sequence(call, b);
  const Tangents& t = p.tangents;
  const Sizes& z = p.sizes;
  if (i0 >= z.seqlen_q) return;  // the sequence ends before these rows
  const int64_t h_kv = z.kv_head(h), rows = smaller<int64_t>(z.seqlen_q - i0, kTileRows);
  const QueryTile<false> tile{b, h, i0, rows, z.seqlen_q};
  const PhiloxKey key = dropout_key(p.dropout);
  const auto query_rows = [&](const Tensor4& tensor) {
    return Rows<In>{tensor.row<In>(b, h, i0), tensor.stride_s, rows};
  };

  JvpStatistics<T> statistics(p, b, h);
  T out[R][kSliceCols] = {}, t_out[R][kSliceCols] = {};
  const Range seen = visible_keys(p.band, i0, i0 + rows, z.seqlen_k);
  for (int64_t j0 = seen.begin / kBlockK * kBlockK; j0 < seen.end; j0 += kBlockK) {
    const int64_t keys = smaller<int64_t>(z.seqlen_k - j0, kBlockK);
    const auto key_rows = [&](const Tensor4& tensor) {
      return Rows<In>{tensor.row<In>(b, h_kv, j0), tensor.stride_s, keys};
    };
    const bool partial = p.mask || !band_covers(p.band, i0, i0 + rows, j0, j0 + keys);
    {
      T products[R][kCols] = {};
      add_row_products(shared, query_rows(p.q), key_rows(p.k), z.head_dim, products);
      store_elements(products, shared.weights);
    }
    {
      T products[R][kCols] = {};
      if (t.q) add_row_products(shared, query_rows(t.q), key_rows(p.k), z.head_dim, products);
      if (t.k) add_row_products(shared, query_rows(p.q), key_rows(t.k), z.head_dim, products);
      store_elements(products, shared.t_weights);
    }
    const uint32_t attends = finish_scores_and_tangents(p, tile, j0, shared);

    T factor[R], shift[R];
    statistics.update(shared, attends, factor, shift);
    if (p.dropout) drop_probs<T, kTileRows>(p, key, tile, j0, shared.weights, shared.t_weights);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < kSliceCols; ++c) {
        t_out[r][c] = (t_out[r][c] - shift[r] * out[r][c]) * factor[r];
        out[r][c] *= factor[r];
      }
    const auto add = [&](const auto& weights, const Tensor4& values, auto& to) {
      add_weighted_rows<false>(shared, weights, key_rows(values), first_col, z.head_dim_v, partial, to);
    };
    add(shared.weights, p.v, out);
    add(shared.t_weights, p.v, t_out);
    if (t.v) add(shared.weights, t.v, t_out);
  }

#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t i = i0 + tile_row(r);
    if (i >= z.seqlen_q) continue;
    const RowResult<T> result = finish_sum(RowSum<T>{statistics.max[r], statistics.sum[r]});
    if (thread_x() == 0 && blockIdx.y == 0) {
      const int64_t n = p.lse_index(b, h, i);
      static_cast<T*>(p.lse)[n] = result.lse;
      static_cast<T*>(p.t_lse)[n] = statistics.mean[r];
    }
#pragma unroll
    for (int c = 0; c < kSliceCols; ++c) {
      const int64_t col = first_col + tile_col(c);
      if (col >= z.head_dim_v) continue;
      p.out.row<In>(b, h, i)[col] = round_to<In>(out[r][c] * result.out_factor);
      p.t_out.row<In>(b, h, i)[col] = round_to<In>(t_out[r][c] * result.out_factor);
    }
  }
}

// Slices of D_v are narrow, because registers hold two results.
template <class In, class T = Accumulator<In>>
cudaError_t launch_jvp(const JvpParams& p, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const LaunchShape shape{z.batch * z.heads * ceil_div(z.seqlen_q, kSide * jvp_rows<T>()),
                          ceil_div(z.head_dim_v, kNarrowSlice), 1, kThreads, sizeof(JvpMemory<T>)};
  return launch(jvp_kernel<In, kNarrowSlice>, shape, stream, p);
}

}  // namespace flash_attn_ext::cuda::simt
