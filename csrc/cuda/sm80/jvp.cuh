// Forward mode on tensor cores: out, lse and their tangents in one kernel (docs/derivative_formulas.md). It is the loop
// of forward.cuh with more sums, as in simt/jvp.cuh: six products for each tile.
//
//   e  = tangent of S      mu' = mu + rowsum(P o (e - mu)) / l
//   tO = (tO - (mu' - mu) O) e^(m - m') + (P o (e - mu')) V + P tV
//   at the end t_lse = mu and t_out = tO / l
//
// P and P o (e - mu') are rounded to 16 bits for their products.
#pragma once

#include "../tangents.cuh"
#include "forward.cuh"

namespace flash_attn_ext::cuda::sm80 {

template <class C>
struct JvpMemory : SharedMemory<C> {
  Tile<typename C::In, C::kBlockQ, C::kHeadDim> t_q;
  Tile<typename C::In, C::kBlockK, C::kHeadDim> t_k[C::kBuffers], t_v[C::kBuffers];
};

// Converts products to scores, and their tangents to tangents of scores, which are 0 if a score is -inf. `scale` is
// product_scale(). Bit 4 n + e of the result: that element attends.
template <int N>
__device__ uint32_t finish_scores_and_tangents(const JvpParams& p, float scale, const ScorePosition& at,
                                               bool partial, float (&scores)[N][4], float (&tangents)[N][4]) {
  const Tangents& t = p.tangents;
  if (!partial && !has_softcap(p) && !p.alibi && !t.alibi && !t.mask) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] *= scale;
        tangents[n][e] = scores[n][e] == -kInf<float> ? 0.0f : tangents[n][e] * scale;
      }
    return ~uint32_t{0};
  }
  uint32_t attends = 0;
  for_each_accumulator(scores, tangents, [&](int n, float (&products)[4], float (&t_products)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t i = at.query(e), j = at.key(n, e);
      const Score<float> score =
          finish_scaled_score(p, rounded_product(products[e], scale), at.b, at.h, i, j, at.inside(n, e));
      float tangent = 0;  // 0 for every product
      if (score.value != -kInf<float>)
        tangent = tangent_of(p, t, score, t_products[e], at.b, at.h, i, j).value;
      products[e] = score.value;
      t_products[e] = tangent;
      attends |= uint32_t{score.attends} << (4 * n + e);
    }
  });
  return attends;
}

// RowStatistics with the tangent. All lanes of a row have all three values.
struct JvpStatistics {
  float max[2], sum[2], mean[2];

  // The sink is a row's first column.
  __device__ JvpStatistics(const JvpParams& p, int64_t b, int64_t h) {
    const RowSum<float> start = add_sink(p, b, h, RowSum<float>{-kInf<float>, 0.0f});
    const float t_start = p.tangents.sink && start.sum != 0 ? p.tangents.sink.of<float>(b, h) : 0.0f;
    for (int r = 0; r < 2; ++r) max[r] = start.max, sum[r] = start.sum, mean[r] = t_start;
  }

  // Converts a tile of scores and tangents to P and P o (e - mean), and updates the statistics. The caller subtracts
  // shift[r] O from the row's sum of tO so far, and multiplies both sums by factor[r].
  template <int N>
  __device__ void update(float (&scores)[N][4], float (&tangents)[N][4], float (&factor)[2],
                         float (&shift)[2]) {
    constexpr float kScale = static_cast<float>(kLog2E);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max = row_maximum(max[r], scores, r);
      const float reference = new_max == -kInf<float> ? 0.0f : new_max;  // as in the forward
      float tile_sum = 0, mean_change = 0;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          scores[n][e] = ptx::exp2_fast((scores[n][e] - reference) * kScale);
          tile_sum += scores[n][e];
          mean_change += scores[n][e] * (tangents[n][e] - mean[r]);
        }
      factor[r] = ptx::exp2_fast((max[r] - reference) * kScale);
      max[r] = new_max;
      sum[r] = sum[r] * factor[r] + total_of_lanes<kRowLanes>(tile_sum);
      mean_change = total_of_lanes<kRowLanes>(mean_change);
      shift[r] = sum[r] == 0 ? 0.0f : mean_change / sum[r];
      mean[r] += shift[r];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) tangents[n][e] = scores[n][e] * (tangents[n][e] - mean[r]);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    jvp_kernel(const JvpParams p, int64_t query_blocks, float scale) {
  using In = typename C::In;
  if (!C::Gpu::kHasCode) return __trap();
  auto& shared = shared_memory<JvpMemory<C>>();
  const QueryBlock<C> block(p.sizes, query_blocks);
  const int64_t b = block.b, h = block.h;
  const int i0 = block.i0;
  const Tangents& t = p.tangents;
  const Sizes& z = p.sizes;
  const int64_t h_kv = z.kv_head(h);
  const Range keys = key_tiles<C>(p, i0);
  const PhiloxKey key = dropout_key(p.dropout);

  // An absent tangent has no tile.
  const auto load = [&](auto& tile, const Tensor4& tensor, int64_t head, int64_t first, int64_t seqlen,
                        int64_t columns) {
    if (tensor) tile.template load_async<C::kThreads>(tensor, b, head, first, seqlen, columns);
  };
  const auto load_k = [&](int j0, int buffer) {
    load(shared.k[buffer], p.k, h_kv, j0, z.seqlen_k, z.head_dim);
    load(shared.t_k[buffer], t.k, h_kv, j0, z.seqlen_k, z.head_dim);
  };
  const auto load_v = [&](int j0, int buffer) {
    load(shared.v[buffer], p.v, h_kv, j0, z.seqlen_k, z.head_dim_v);
    load(shared.t_v[buffer], t.v, h_kv, j0, z.seqlen_k, z.head_dim_v);
  };
  const auto copies = copies_of<C>(load_k, load_v, static_cast<int>(keys.end));
  if (keys.begin < keys.end) {  // otherwise no thread waits for them
    load(shared.q, p.q, h, i0, z.seqlen_q, z.head_dim);
    load(shared.t_q, t.q, h, i0, z.seqlen_q, z.head_dim);
  }
  copies.start(keys.begin);

  JvpStatistics statistics(p, b, h);
  float out[C::kHeadDim / 8][4] = {}, t_out[C::kHeadDim / 8][4] = {};
  int buffer = 0;
  for (int j0 = static_cast<int>(keys.begin); j0 < keys.end; j0 += C::kBlockK, buffer ^= C::kBuffers - 1) {
    const ScorePosition at{z, b, h, i0, j0};
    const bool partial = is_partial<C>(p, at);

    copies.wait_for_k(j0, j0 + C::kBlockK, buffer);
    float scores[C::kBlockK / 8][4] = {}, tangents[C::kBlockK / 8][4] = {};
    multiply_rows(shared.q, shared.k[buffer], scores);
    if (t.q) multiply_rows(shared.t_q, shared.k[buffer], tangents);
    if (t.k) multiply_rows(shared.q, shared.t_k[buffer], tangents);
    const uint32_t attends = finish_scores_and_tangents(p, scale, at, partial, scores, tangents);
    float factor[2], shift[2];
    statistics.update(scores, tangents, factor, shift);
    if (p.dropout) drop_probs(p, key, at, block.head, scores, tangents);
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        t_out[n][e] = (t_out[n][e] - shift[e / 2] * out[n][e]) * factor[e / 2];
        out[n][e] *= factor[e / 2];
      }

    copies.wait_for_v(j0 + C::kBlockK, buffer);
    auto &values = shared.v[buffer], &t_values = shared.t_v[buffer];
    if (partial) {
      take_out_non_finite_rows(values, shared, [&](const auto& is_finite) {
        add_non_finite_rows(scores, AttendingBits<>{attends}, values, is_finite, out);
        add_non_finite_rows(tangents, AttendingBits<>{attends}, values, is_finite, t_out);
      });
      if (t.v)
        take_out_non_finite_rows(t_values, shared, [&](const auto& is_finite) {
          add_non_finite_rows(scores, AttendingBits<>{attends}, t_values, is_finite, t_out);
        });
    }
    multiply_probs(scores, values, out);
    multiply_probs(tangents, values, t_out);
    if (t.v) multiply_probs(scores, t_values, t_out);
  }

  const ScorePosition at_end{z, b, h, i0, 0};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowResult<float> result = finish_sum(RowSum<float>{statistics.max[r], statistics.sum[r]});
    const float factor = result.out_factor * (p.dropout ? static_cast<float>(p.dropout.keep_scale) : 1.0f);
    const int64_t i = at_end.query(2 * r);
    if (i >= z.seqlen_q) continue;
    if (lane() % 4 == 0) {
      const int64_t row = p.lse_index(b, h, i);
      static_cast<float*>(p.lse)[row] = result.lse;
      static_cast<float*>(p.t_lse)[row] = statistics.mean[r];
    }
    store_row(p.out.row<In>(b, h, i), z.head_dim_v, r, factor, out);
    store_row(p.t_out.row<In>(b, h, i), z.head_dim_v, r, factor, t_out);
  }
}

template <class C>
cudaError_t launch_jvp_padded(const JvpParams& p, cudaStream_t stream) {
  const int64_t query_blocks = ceil_div(p.sizes.seqlen_q, C::kBlockQ);
  const LaunchShape shape{p.sizes.batch * p.sizes.heads * query_blocks, 1, 1, C::kThreads,
                          sizeof(JvpMemory<C>)};
  return launch(jvp_kernel<C>, shape, stream, p, query_blocks, product_scale<float>(p));
}

// 97 KB each. With more columns neither two results of a row would fit in registers, nor q, k, v and their tangents in
// shared memory.
template <class In>
cudaError_t launch_jvp(const JvpParams& p, cudaStream_t stream) {
  const int64_t widest = std::max(p.sizes.head_dim, p.sizes.head_dim_v);
  return widest <= 64 ? launch_jvp_padded<Config<In, 64, 64, 2>>(p, stream)
                      : launch_jvp_padded<Config<In, 128, 32, 1>>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm80
