// One tile of the backward, keys by queries: converts products to P^T and dS^T.
//
//   P = 2^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
#pragma once

#include "../scores.cuh"
#include "../shared_memory.h"
#include "backward_schedule.h"
#include "tile.cuh"
#include "tile_functions.cuh"

namespace flash_attn_ext::cuda::sm80 {

// The kernels of the backward. The first two are for calls with is_plain(), and have registers for longer loops: dense
// tensors, packed sequences. The other two compute all other calls, without and with dropout.
enum class BackwardForm { kPlain, kPlainPacked, kOptions, kDropout };

// Up to a head dimension of 128, a warp has 16 keys, with their dK and dV in its registers. Beyond 128, the registers
// of a warp hold half of dK and dV, so two warps share 16 keys. Each warp computes P and dS for half of the queries,
// and half of the columns of dK and dV. They exchange P^T and dS^T through shared memory.
//
// Every GPU has 99 KB of shared memory. At 256, K, V, one Q and dO leave 3 KB, and P and dS need 8 KB. So Q has one
// buffer instead of two, and the last 64 columns of V are in registers, as operands of dP = dO V^T. Tiles of 16 queries
// would also fit, but each tile would read all of K and V for half as many products.
//
// On compute capability 7.5 a block has 64 KB. So beyond a head dimension of 64 two warps share 16 keys, a tile has 32
// queries, and Q has one buffer.
template <class In_, int kHeadDim_, BackwardForm kForm, class Gpu_ = Ampere>
struct BackwardConfig {
  using In = In_;
  using Gpu = Gpu_;
  static constexpr bool kTuring = !Gpu::kAsyncCopies;
  static constexpr BackwardTiles kTiles = backward_tiles<Gpu>(kHeadDim_);
  static constexpr int kHeadDim =
      kHeadDim_;  // of q, k, v and out; smaller head dimensions are padded with zeros
  static constexpr bool kDropout = kForm == BackwardForm::kDropout;
  static constexpr bool kPlain = kForm == BackwardForm::kPlain || kForm == BackwardForm::kPlainPacked;
  static constexpr bool kPacked = kForm != BackwardForm::kPlain;  // computes packed sequences
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlockK = kTiles.keys, kBlockQ = kTiles.rows;
  static constexpr int kKeyWarps = kBlockK / 16,
                       kSharers = kWarps / kKeyWarps;       // the warps that share 16 keys
  static constexpr int kColumns = kBlockQ / kSharers / 8;   // 16 x 8 accumulators in a warp's part of a tile
  static constexpr int kGradColumns = kHeadDim / kSharers;  // columns of dK and dV in a warp's registers
  static constexpr int kQBuffers = kHeadDim <= 192 && !kTuring ? 2 : 1;
  static constexpr int kLater = kQBuffers - 1;  // groups of copies that may be in flight when Q is used
  static constexpr int kHeldColumns = kHeadDim <= 192 ? 0 : 64;  // columns of V in registers
  static constexpr int kStoredColumns = kHeadDim - kHeldColumns;
  // Unrolled steps of a product. With more, registers spill.
  static constexpr int kUnrolled = kPlain || kSharers > 1 ? 4 : kHeadDim == 128 && !kDropout ? 1 : 2;

  // The first key, query and column of dK and dV of the warp's part.
  static __device__ int first_key() { return 16 * (kSharers == 1 ? warp() : warp() % kKeyWarps); }
  static __device__ int first_query() { return sharer() * 8 * kColumns; }
  static __device__ int first_column() { return sharer() * kGradColumns; }

 private:
  static __device__ int sharer() { return kSharers == 1 ? 0 : warp() / kKeyWarps; }
};

// The row terms (simt/schedule.h) of a tile's queries.
template <int kRows>
struct TermsTile {
  float delta[kRows], reference[kRows], correction[kRows];

  // Starts the copy of `count` rows. Further rows are zeros, as in q and dout.
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
  using HeldTile = Tile<In, C::kBlockK, C::kHeldColumns>;
  Tile<In, C::kBlockK, C::kHeadDim> k;
  Tile<In, C::kBlockK, C::kStoredColumns> v;
  Tile<In, C::kBlockQ, C::kHeadDim> q[C::kQBuffers], dout;
  Tile<In, C::kBlockK, C::kBlockQ> scores[C::kSharers];
  TermsTile<C::kBlockQ> terms[C::kQBuffers];
  int ticket;

  __device__ auto& dscores() { return scores[0]; }              // dS^T
  __device__ auto& probs() { return scores[C::kSharers - 1]; }  // P^T; used by warps that share keys
  // The columns of V for registers. They are loaded into memory that dS and P use later.
  __device__ HeldTile& last_v() {
    static_assert(sizeof(HeldTile) <= sizeof(scores));
    return *static_cast<HeldTile*>(static_cast<void*>(scores));
  }
};

// The query and key of a thread's elements: element e of accumulator n. The tile is transposed: keys are rows.
template <class C>
struct TransposedPosition {
  int b, h, i0, j0;

  static __device__ int column(int n, int e) { return C::first_query() + 8 * n + lane() % 4 * 2 + e % 2; }
  __device__ int query(int n, int e) const { return i0 + column(n, e); }
  __device__ int key(int e) const { return j0 + C::first_key() + static_cast<int>(lane()) / 4 + e / 2 * 8; }
  __device__ bool inside(const Sizes& z, int n, int e) const {
    return query(n, e) < z.seqlen_q && key(e) < z.seqlen_k;
  }
  __device__ ElementIndex element(int n, int e) const { return {b, h, query(n, e), key(e)}; }
};

// The last columns of V in a warp's 16 rows, as operands of dP^T = V dO^T. Empty if shared memory has all columns.
template <class C>
struct HeldValues {
  static constexpr int kOperands = C::kHeldColumns / 16;
  uint32_t operands[kOperands == 0 ? 1 : kOperands][4] = {};

  __device__ void load(BackwardMemory<C>& shared) {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) load_operand(shared.last_v(), C::first_key(), k, operands[k]);
  }
  __device__ void multiply(BackwardMemory<C>& shared, float (&dprobs)[C::kColumns][4]) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      multiply_row_operand(operands[k], shared.dout, C::first_query(), C::kStoredColumns / 16 + k, dprobs);
  }
};

// acc += W B with the warp's rows of W and its columns of B: dV = P^T dO, dK = dS^T Q. If no other warp shares these
// rows, they are operands in registers. Otherwise all of W is in shared memory.
template <class C, class WTile, class BTile, int kOperands, int N>
__device__ void add_gradient(const uint32_t (&operands)[kOperands][4], WTile& w, BTile& b,
                             float (&acc)[N][4]) {
  if constexpr (C::kSharers == 1)
    multiply_packed(operands, b, acc);
  else
    multiply_stored(w, C::first_key(), b, C::first_column(), acc);
}

// The elements of a thread that dropout keeps. One Philox call is for a 2 x 2 block {i, i + 8} x {j, j + 1}. Lane l has
// one of these keys, and lane l + 4 the other. So each of the two lanes computes one of two blocks, for the queries i
// and i + 1, and they exchange the bits.
struct KeptElements {
  uint32_t bits[2];  // of even and of odd columns

  template <class C>
  static __device__ KeptElements of(const BackwardParams& p, const TransposedPosition<C>& at) {
    const int odd = lane() / 4 % 2;  // this lane has the key j + 1
    const PhiloxKey key = dropout_key(p.dropout);
    uint32_t mine = 0;
#pragma unroll 1
    for (int call = 0; call < C::kColumns; ++call) {  // two calls for 16 queries: keys 0 to 7, keys 8 to 15
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
  float gated[N][4];          // P times the derivative of the softcap: for dS
  uint32_t packed[N / 2][4];  // after dropout, but without its factor: the operand of dV += P^T dO
  uint32_t attends;           // bit 4 n + e: that element attends
  KeptElements kept;          // with dropout
};

// Converts products to scores, -inf where hidden, and computes the derivatives of the softcap. Bit 4 n + e of the
// result: that element attends.
template <class Position, int N>
__device__ uint32_t finish_scores(const BackwardParams& p, float scale, const Position& at,
                                  float (&scores)[N][4], float (&gates)[N][4]) {
  uint32_t attends = 0;
  for_each_accumulator(scores, gates, [&](int n, float (&products)[4], float (&gate)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t i = at.query(n, e), j = at.key(e);
      const Score<float> score = finish_scaled_score(p, rounded_product(products[e], scale), at.b, at.h, i, j,
                                                     at.inside(p.sizes, n, e));
      products[e] = score.value;
      gate[e] = 1 - score.tanh * score.tanh;
      attends |= uint32_t{score.attends} << (4 * n + e);
    }
  });
  return attends;
}

// The same for calls with is_plain(), from scores. Faster, because the limits of a key are computed once, in 32 bits.
template <class Position, int N>
__device__ uint32_t hide_outside_band(const BackwardParams& p, const Position& at, float (&scores)[N][4]) {
  const DiagonalBand& band = p.band.without_chunks();
  const Sizes& z = p.sizes;
  uint32_t attends = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t first = at.query(0, 0), j = at.key(2 * r) - band.diagonal;
    const int64_t end_query = at.key(2 * r) < z.seqlen_k ? smaller(j + band.left + 1, z.seqlen_q) : 0;
    hide_outside_columns(
        r, Range{j - band.right - first, end_query - first}, scores, [](int, int) { return true; },
        [&](int n, int e, bool shows) { attends |= uint32_t{shows} << (4 * n + e); });
  }
  return attends;
}

// Converts products to scores. `scale`: product_scale(). `partial`: the tile may have hidden elements.
template <class C, class Position, int N>
__device__ void recompute_scores(const BackwardParams& p, float scale, const Position& at, bool partial,
                                 float (&scores)[N][4], Probs<N>& probs) {
  probs.attends = ~0u;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) probs.gated[n][e] = 1;
  if (!C::kPlain && (partial || has_softcap(p) || p.alibi)) {
    probs.attends = finish_scores(p, scale, at, scores, probs.gated);
    return;
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
  if (C::kPlain && partial) probs.attends = hide_outside_band(p, at, scores);
}

template <class C, int N>
__device__ void recompute_probs(const BackwardParams& p, const TransposedPosition<C>& at,
                                const TermsTile<C::kBlockQ>& terms, float (&scores)[N][4], Probs<N>& probs) {
  if constexpr (C::kDropout) probs.kept = KeptElements::of(p, at);
  constexpr float kScale = static_cast<float>(kLog2E);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = at.column(n, e);
      // First the difference, because it is exact for large scores.
      const float exponent =
          fmaf(scores[n][e] - terms.reference[row], kScale, -(terms.correction[row] * kScale));
      const float power = ptx::exp2_fast(exponent);
      const float prob = scores[n][e] == -kInf<float> ? 0.0f : power;  // 0 for every lse
      probs.gated[n][e] *= prob;
      scores[n][e] = !C::kDropout || probs.kept(n, e) ? prob : 0.0f;
    }
    if (n % 2 == 1) pack_operand<typename C::In>(scores[n - 1], scores[n], probs.packed[n / 2]);
  }
}

// Converts dP to dS, without the factor `scale`, which multiplies the result at the end, in fp32. A hidden element is
// 0, also if dP or delta is NaN. `change` changes dS before its conversion to 16 bits.
template <class C, int N, class Change>
__device__ void finish_dscores(float keep_scale, const TermsTile<C::kBlockQ>& terms, const Probs<N>& probs,
                               float (&dprobs)[N][4], uint32_t (&dscores)[N / 2][4], const Change& change) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float dropped = dprobs[n][e];
      if constexpr (C::kDropout) dropped *= probs.kept(n, e) ? keep_scale : 0.0f;
      const float centred = dropped - terms.delta[TransposedPosition<C>::column(n, e)];
      const bool visible = probs.attends >> (4 * n + e) & 1;
      dprobs[n][e] = visible ? probs.gated[n][e] * centred : 0.0f;
    }
  }
  change();
#pragma unroll
  for (int n = 0; n < N; n += 2) pack_operand<typename C::In>(dprobs[n], dprobs[n + 1], dscores[n / 2]);
}

// Writes the warp's part of P^T or dS^T.
template <class C, class ScoreTile>
__device__ void store_scores(const uint32_t (&scores)[C::kColumns / 2][4], ScoreTile& tile) {
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<uint32_t*>(
          tile.chunk(C::first_key() + lane() / 4 + 8 * r, C::first_query() / kChunk + n) + lane() % 4 * 2) =
          scores[n / 2][n % 2 * 2 + r];
}

}  // namespace flash_attn_ext::cuda::sm80
