// Repairs gradients that are NaN because of hidden elements.
//
// A hidden element of P or dS is 0, but in a matrix product 0 * NaN and 0 * Inf are NaN. The backward kernel flags each
// piece of 64 rows of a gradient that contains a NaN. Then a block repairs each flagged piece. A row is repaired only
// if a row that is hidden from it is not finite. A warp computes the row's NaN columns by the definition, from visible
// elements, and stops when each of these columns is NaN again. So after an overflow of fp16, where every row is
// correctly NaN, a row takes only a few steps. The host does not wait for the GPU: blocks of pieces that are not
// flagged return at once.
#pragma once

#include "../call_of_block.cuh"
#include "../lane_rows.cuh"
#include "../launch.h"
#include "../ptx.h"
#include "backward_schedule.h"
#include "tile_functions.cuh"

namespace flash_attn_ext::cuda::sm80 {

// One kernel for all head dimensions and for packed sequences, because its time does not matter.
template <class In_, class Gpu_ = Ampere>
struct RepairConfig {
  using In = In_;
  using Gpu = Gpu_;
  static constexpr bool kPacked = true;
  static constexpr int kHeadDim = 256, kWarps = 8, kThreads = 32 * kWarps;
};

struct RepairedElement {
  float prob, dscore;  // after dropout; without the factor `scale`
  bool attends;
};

template <class C, class Functions>
struct Repair {
  using In = typename C::In;
  using Row = LaneRow<In, C::kHeadDim>;
  using Columns = NanColumns<In, C::kHeadDim>;

  const BackwardParams& p;
  const BackwardWorkspace& w;
  int64_t b;
  Functions functions;

  __device__ Score<float> score_of(int64_t h, int64_t i, int64_t j, float product) const {
    return finish_scaled_score(p, rounded_product(product, w.score_scale), b, h, i, j, true);
  }
  __device__ bool is_hidden(int64_t h, int64_t i, int64_t j) const {
    const Score<float> score = score_of(h, i, j, 0);
    return !score.attends || functions.hides(p, {b, h, i, j}, score.value);
  }

  __device__ RepairedElement element(const Score<float>& score, int64_t h, int64_t i, int64_t j, const Row& v,
                                     const Row& dout) const {
    const int64_t row = p.lse_index(b, h, i);
    const simt::RowTerms<float>& terms = w.simt.rows;
    const ElementIndex at{b, h, i, j};
    const float new_score = functions.new_score(p, at, score.value);
    constexpr float kScale = static_cast<float>(kLog2E);
    const float exponent = fmaf(new_score - terms.reference[row], kScale, -(terms.correction[row] * kScale));
    const bool attends = new_score != -kInf<float>;
    const float prob = attends ? ptx::exp2_fast(exponent) : 0.0f;
    const float kept = p.dropout ? dropout_factor<float>(p, dropout_key(p.dropout), b, h, i, j) : 1.0f;
    const float gate = 1 - score.tanh * score.tanh;
    const float dnew = prob * (dout.dot(v) * kept - terms.delta[row]);
    return {prob * kept, gate * functions.old_gradient(p, at, score.value, dnew), attends};
  }

  // Whether one of the query rows that share a tile with key j is hidden from it and not finite.
  __device__ bool hides_non_finite_query(int64_t h, int64_t j, Range tile_keys) const {
    const Sizes& z = p.sizes;
    const Range read =
        whole_tiles(visible_queries(p.band.without_chunks(), tile_keys.begin, tile_keys.end, z.seqlen_q),
                    w.tiles.rows, z.seqlen_q);
    const auto hidden = [&](int64_t i) { return is_hidden(h, i, j); };
    return has_non_finite_rows<In, C::kHeadDim>(p.q, b, h, read, z.head_dim, hidden) ||
           has_non_finite_rows<In, C::kHeadDim>(p.dout, b, h, read, z.head_dim_v, hidden);
  }
  // The same for the keys that share a tile with query i.
  __device__ bool hides_non_finite_key(int64_t h, int64_t i) const {
    const Sizes& z = p.sizes;
    const int rows = w.tiles.rows;
    const int64_t first = i / rows * rows;
    const Range seen =
        visible_keys(p.band.without_chunks(), first, smaller<int64_t>(first + rows, z.seqlen_q), z.seqlen_k);
    const Range read = whole_tiles(seen, w.tiles.keys, z.seqlen_k);
    const auto hidden = [&](int64_t j) { return is_hidden(h, i, j); };
    return has_non_finite_rows<In, C::kHeadDim>(p.k, b, z.kv_head(h), read, z.head_dim, hidden);
  }

  __device__ void repair_key(int64_t h_kv, int64_t j, Range tile_keys) const {
    const Sizes& z = p.sizes;
    const Columns of_dk = p.dk ? Columns(p.dk, b, h_kv, j, 0, z.head_dim) : Columns();
    const Columns of_dv = p.dv ? Columns(p.dv, b, h_kv, j, 0, z.head_dim_v) : Columns();
    const bool any = of_dk.any(), any_v = of_dv.any();
    if (!any && !any_v) return;
    const int64_t group = z.heads / z.heads_kv, first_head = h_kv * group;
    bool repairs = false;
    for (int64_t h = first_head; h < first_head + group && !repairs; ++h)
      repairs = hides_non_finite_query(h, j, tile_keys);
    if (!repairs) return;
    const Range seen = visible_queries(p.band.without_chunks(), j, j + 1, z.seqlen_q);
    const Row k(p.k, b, h_kv, j, z.head_dim), v(p.v, b, h_kv, j, z.head_dim_v);
    Row dk, dv;
    for (int64_t h = first_head; h < first_head + group; ++h)
      for (int64_t i = seen.begin; i < seen.end && (of_dk.any_open(dk.x) || of_dv.any_open(dv.x)); ++i) {
        if (is_hidden(h, i, j)) continue;
        const Row q(p.q, b, h, i, z.head_dim), dout(p.dout, b, h, i, z.head_dim_v);
        const RepairedElement e = element(score_of(h, i, j, q.dot(k)), h, i, j, v, dout);
        if (!e.attends) continue;
        dk.add(e.dscore, q);
        dv.add(e.prob, dout);
      }
    of_dk.store(p.dk, b, h_kv, j, static_cast<float>(p.scale), dk.x);
    of_dv.store(p.dv, b, h_kv, j, 1.0f, dv.x);
  }

  __device__ void repair_query(int64_t h, int64_t i) const {
    const Sizes& z = p.sizes;
    const int64_t h_kv = z.kv_head(h);
    const Columns columns(p.dq, b, h, i, 0, z.head_dim);
    if (!columns.any() || !hides_non_finite_key(h, i)) return;
    const Range seen = visible_keys(p.band.without_chunks(), i, i + 1, z.seqlen_k);
    const Row q(p.q, b, h, i, z.head_dim), dout(p.dout, b, h, i, z.head_dim_v);
    Row dq;
    for (int64_t j = seen.begin; j < seen.end && columns.any_open(dq.x); ++j) {
      if (is_hidden(h, i, j)) continue;
      const Row k(p.k, b, h_kv, j, z.head_dim), v(p.v, b, h_kv, j, z.head_dim_v);
      const RepairedElement e = element(score_of(h, i, j, q.dot(k)), h, i, j, v, dout);
      if (e.attends) dq.add(e.dscore, k);
    }
    columns.store(p.dq, b, h, i, static_cast<float>(p.scale), dq.x);
  }

 private:
  // `seen`, rounded outwards to whole tiles: rows that the products of these tiles read.
  static __device__ Range whole_tiles(Range seen, int tile, int64_t seqlen) {
    if (seen.begin >= seen.end) return {0, 0};
    return {seen.begin / tile * tile, smaller<int64_t>(ceil_div(seen.end, tile) * tile, seqlen)};
  }
};

// A block for each flag of dq.
template <class C, class Functions>
__global__ void __launch_bounds__(C::kThreads, 1)
    repair_dq_kernel(const BackwardParams call, const BackwardWorkspace w, const Functions functions) {
  if (!C::Gpu::kHasCode) return __trap();
  if (!w.flags.queries[blockIdx.x]) return;
  const int64_t tiles = NanFlags::tiles(call.sizes.seqlen_q), head = blockIdx.x / tiles;
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads;
  const BackwardParams p = call_of_block<C>(call, b);
  const Repair<C, Functions> repair{p, w, b, functions};
  const int64_t first = blockIdx.x % tiles * kFlaggedRows;
  const int64_t end = smaller<int64_t>(first + kFlaggedRows, p.sizes.seqlen_q);
#pragma unroll 1
  for (int64_t i = first + threadIdx.x / 32; i < end; i += C::kWarps) repair.repair_query(h, i);
}

// A block for each flag of dk and dv.
template <class C, class Functions>
__global__ void __launch_bounds__(C::kThreads, 1)
    repair_dkv_kernel(const BackwardParams call, const BackwardWorkspace w, const Functions functions) {
  if (!C::Gpu::kHasCode) return __trap();
  if (!w.flags.keys[blockIdx.x]) return;
  const int64_t tiles = NanFlags::tiles(call.sizes.seqlen_k), head = blockIdx.x / tiles;
  const int64_t b = head / call.sizes.heads_kv, h_kv = head % call.sizes.heads_kv;
  const BackwardParams p = call_of_block<C>(call, b);
  const Repair<C, Functions> repair{p, w, b, functions};
  const int64_t first = blockIdx.x % tiles * kFlaggedRows, seqlen = p.sizes.seqlen_k;
  const int64_t end = smaller<int64_t>(first + kFlaggedRows, seqlen), block = w.tiles.keys;
  const int64_t first_key = first / block * block;
  const Range tile_keys{first_key, smaller<int64_t>(first_key + block, seqlen)};
#pragma unroll 1
  for (int64_t j = first + threadIdx.x / 32; j < end; j += C::kWarps) repair.repair_key(h_kv, j, tile_keys);
}

template <class In, class Gpu, class Functions = NoFunctions>
cudaError_t launch_repair(const BackwardParams& p, const BackwardWorkspace& w, cudaStream_t stream,
                          const Functions& functions = {}) {
  using C = RepairConfig<In, Gpu>;
  const Sizes& z = p.sizes;
  const int64_t queries = p.dq ? z.batch * z.heads * NanFlags::tiles(z.seqlen_q) : 0;
  const int64_t keys = p.dk || p.dv ? z.batch * z.heads_kv * NanFlags::tiles(z.seqlen_k) : 0;
  return in_order(
      [&] {
        return launch(repair_dq_kernel<C, Functions>, {queries, 1, 1, C::kThreads}, stream, p, w, functions);
      },
      [&] {
        return launch(repair_dkv_kernel<C, Functions>, {keys, 1, 1, C::kThreads}, stream, p, w, functions);
      });
}

}  // namespace flash_attn_ext::cuda::sm80
