// One tile of the backward, keys by queries: from products to P^T and dS^T, and where its elements lie.
//
//   P = 2^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
#pragma once

#include "../scores.cuh"
#include "../shared_memory.h"
#include "backward_plan.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

template <class In_, int kHeadDim_, bool kPacked_ = false>
struct BackwardConfig {
  using In = In_;
  static constexpr int kHeadDim = kHeadDim_;  // of q, k, v and out; smaller ones are padded with zeros
  static constexpr bool kPacked = kPacked_;   // takes packed sequences, and nothing else
  static constexpr int kWarps = kBackwardWarps, kThreads = 32 * kWarps;
  static constexpr int kBlockK = kBackwardKeys, kBlockQ = backward_rows(kHeadDim_);
  static constexpr int kColumns = kBlockQ / 8;  // 16 x 8 accumulators in a warp's rows of a tile
  static constexpr int kUnrolled = 2;           // of the products' steps: with more, registers spill
};

// simt's RowTerms of a tile's queries.
template <int kRows>
struct TermsTile {
  float delta[kRows], reference[kRows], correction[kRows];

  // Starts the copy of `count` rows; zeros beyond them, where q and dout are zero too.
  __device__ void load_async(const simt::RowTerms<float>& terms, int64_t first, int64_t count) {
    const int row = threadIdx.x % kRows;
    const bool inside = row < count;
    const int64_t from = inside ? first + row : 0;
    switch (threadIdx.x / kRows) {
      case 0: return ptx::cp_async_4(delta + row, terms.delta + from, inside);
      case 1: return ptx::cp_async_4(reference + row, terms.reference + from, inside);
      case 2: return ptx::cp_async_4(correction + row, terms.correction + from, inside);
    }
  }
};

template <class C>
struct BackwardMemory {
  using In = typename C::In;
  Tile<In, C::kBlockK, C::kHeadDim> k, v;
  Tile<In, C::kBlockQ, C::kHeadDim> q[2], dout;
  Tile<In, C::kBlockK, C::kBlockQ> dscores;  // dS^T
  TermsTile<C::kBlockQ> terms[2];
  int ticket;
};
static_assert(sizeof(BackwardMemory<BackwardConfig<__half, 64>>) <= kMaxSharedBytes);
static_assert(sizeof(BackwardMemory<BackwardConfig<__half, 128>>) <= kMaxSharedBytes);

// Where a thread's elements of a tile lie: element e of accumulator n. The tile is transposed: keys are rows.
struct TransposedPlace {
  int b, h;
  int64_t i0, j0;

  static __device__ int column(int n, int e) { return 8 * n + lane() % 4 * 2 + e % 2; }
  __device__ int64_t query(int n, int e) const { return i0 + column(n, e); }
  __device__ int64_t key(int e) const { return j0 + 16 * warp() + lane() / 4 + e / 2 * 8; }
};

// Which of a thread's elements dropout keeps. One Philox call is for a 2 x 2 block {i, i + 8} x {j, j + 1}. A
// lane has one of these keys, and the lane four further has the other. So of two such blocks, for the queries
// i and i + 1, each of the two lanes computes one, and they exchange the bits.
struct KeptElements {
  uint32_t bits[2];  // of even and of odd columns

  template <int N>
  static __device__ KeptElements of(const BackwardParams& p, const TransposedPlace& at) {
    const int odd = lane() / 4 % 2;  // this lane has the key j + 1
    const PhiloxKey key = dropout_key(p.dropout);
    uint32_t mine = 0;
#pragma unroll 1
    for (int call = 0; call < N; ++call) {  // two for 16 queries: keys 0 to 7, keys 8 to 15
      const int n = call / 2 * 2, e = call % 2 * 2 + odd;
      const PhiloxWords words = dropout_words(key, at.b * p.sizes.heads + at.h, at.query(n, e), at.key(e));
#pragma unroll
      for (int w = 0; w < 4; ++w) mine |= uint32_t{words.w[w] >= p.dropout.threshold} << (4 * call + w);
    }
    const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 4);
    return {{(odd ? other : mine) >> odd, (odd ? mine : other) >> odd}};
  }

  __device__ bool operator()(int n, int e) const {
    const int call = n / 2 * 2 + e / 2;
    return bits[e % 2] >> (4 * call + n % 2 * 2) & 1;
  }
};

// P of a thread's elements.
template <int N>
struct Probs {
  float gated[N][4];          // times the derivative of the softcap: for dS
  uint32_t packed[N / 2][4];  // after dropout, but without its factor: the operand of dV += P^T dO
  uint32_t attends;           // bit 4 n + e: that element attends
  KeptElements kept;
};

// Products become scores, -inf where masked, and the derivatives of the softcap; bit 4 n + e of the result:
// that element attends.
template <int N>
__device__ uint32_t finish_scores(const BackwardParams& p, const TransposedPlace& at, float (&scores)[N][4],
                                  float (&gates)[N][4]) {
  uint32_t attends = 0;
  for_each_accumulator(scores, gates, [&](int n, float (&products)[4], float (&gate)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t i = at.query(n, e), j = at.key(e);
      const bool inside = i < p.sizes.seqlen_q && j < p.sizes.seqlen_k;
      const Score<float> score = finish_score(p, products[e], at.b, at.h, i, j, inside);
      products[e] = score.value;
      gate[e] = 1 - score.tanh * score.tanh;
      attends |= uint32_t{score.attends} << (4 * n + e);
    }
  });
  return attends;
}

// `partial`: something of the tile may be masked.
template <class In, int N>
__device__ void recompute_probs(const BackwardParams& p, const TransposedPlace& at, bool partial,
                                const TermsTile<8 * N>& terms, float (&scores)[N][4], Probs<N>& probs) {
  probs.attends = ~0u;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) probs.gated[n][e] = 1;
  if (partial || p.softcap > 0 || p.alibi) {
    probs.attends = finish_scores(p, at, scores, probs.gated);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= product_scale<float>(p);
  }
  probs.kept = p.dropout ? KeptElements::of<N>(p, at) : KeptElements{{~0u, ~0u}};
  constexpr float kScale = static_cast<float>(kLog2E);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = TransposedPlace::column(n, e);
      // The difference is taken first: it is exact where the scores are large.
      const float exponent =
          fmaf(scores[n][e] - terms.reference[row], kScale, -(terms.correction[row] * kScale));
      const float power = ptx::exp2_fast(exponent);
      const float prob = scores[n][e] == -kInf<float> ? 0.0f : power;  // 0 whatever lse holds
      probs.gated[n][e] *= prob;
      scores[n][e] = probs.kept(n, e) ? prob : 0.0f;
    }
    if (n % 2 == 1) pack_operand<In>(scores[n - 1], scores[n], probs.packed[n / 2]);
  }
}

// dP becomes dS, without the factor `scale`: the result is multiplied with it at the end, in fp32. What is
// masked is 0, also where dP or delta is NaN.
template <class In, int N>
__device__ void finish_dscores(const BackwardParams& p, const TermsTile<8 * N>& terms, const Probs<N>& probs,
                               float (&dprobs)[N][4], uint32_t (&dscores)[N / 2][4]) {
  const float keep_scale = p.dropout ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = probs.kept(n, e) ? keep_scale : 0.0f;
      const float centred = dprobs[n][e] * factor - terms.delta[TransposedPlace::column(n, e)];
      const bool visible = probs.attends >> (4 * n + e) & 1;
      dprobs[n][e] = visible ? probs.gated[n][e] * centred : 0.0f;
    }
    if (n % 2 == 1) pack_operand<In>(dprobs[n - 1], dprobs[n], dscores[n / 2]);
  }
}

// Writes the warp's rows of dS^T.
template <class In, int kRows, int kCols>
__device__ void store_dscores(const uint32_t (&dscores)[kCols / 16][4], Tile<In, kRows, kCols>& tile) {
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<uint32_t*>(tile.chunk(16 * warp() + lane() / 4 + 8 * r, n) + lane() % 4 * 2) =
          dscores[n / 2][n % 2 * 2 + r];
}

}  // namespace flash_attn_ext::cuda::sm80
