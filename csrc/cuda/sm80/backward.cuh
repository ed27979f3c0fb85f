// Backward on tensor cores: FlashAttention-2, algorithm 2, five products for each tile. A block computes dK and dV of
// 128 keys of a key head (64 beyond a head dimension of 128). It loops over all queries that see them. Tiles are
// transposed, keys by queries, so that the registers of P^T and dS^T are operands of dV += P^T dO and dK += dS^T Q. dQ
// is added to an fp32 sum in global memory; dq_kernel rounds it.
//
// A deterministic call gives the same bits in every run: blocks add to a tile of dQ in turns. A block must wait only
// for blocks that already run. So each block draws a ticket when it starts, and the ticket determines its keys. An
// alternative without turns is a kernel in which blocks own queries; it needs seven products.
#pragma once

#include "../call_of_block.cuh"
#include "../launch.h"
#include "backward_tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// A thread's elements of a tile of dQ. A warp computes 16 rows.
template <class C>
struct QueryGradient {
  static constexpr int kRowPieces = C::kBlockQ / 16, kColumns = C::kHeadDim * kRowPieces / C::kWarps;
  static constexpr int kAccumulators = kColumns / 8;
  float acc[kAccumulators][4] = {};

  static __device__ int first_row() { return warp() % kRowPieces * 16; }
  static __device__ int first_col() { return warp() / kRowPieces * kColumns; }

  // The sum of the thread's element 0. The next elements are 32 floats apart, so that lanes are neighbours in memory.
  static __device__ float* sums(const BackwardWorkspace& w, int64_t tile) {
    return w.dq + tile * C::kBlockQ * C::kHeadDim + warp() * 16 * kColumns + lane();
  }
};

// dq_tile += dS K. `turn`: the number of blocks that add before this block; -1: any order.
template <class C>
__device__ void add_query_gradient(BackwardMemory<C>& shared, const BackwardWorkspace& w,
                                   const QueryGradientTile& tile, int turn) {
  using Gradient = QueryGradient<C>;
  Gradient dq;
  multiply_transposed(shared.dscores(), shared.k, Gradient::first_row(), Gradient::first_col(), dq.acc);
  if (turn >= 0) {
    if (threadIdx.x == 0) ptx::acquire_turn(w.turns + tile.turns, turn);  // earlier blocks have added
    __syncthreads();                                                      // all threads may add
  }
  float* const sums = Gradient::sums(w, tile.sums);
#pragma unroll
  for (int n = 0; n < Gradient::kAccumulators; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(sums + (4 * n + e) * 32, dq.acc[n][e]);
  if (turn >= 0) {
    __syncthreads();                                                // all threads have added
    if (threadIdx.x == 0) ptx::release_turn(w.turns + tile.turns);  // the next block may add
  }
}

// Writes a warp's part of the existing rows in [first, first + 16) of a gradient. Returns whether one of the thread's
// elements is NaN.
template <class In, int N>
__device__ bool store_rows(const Tensor4& grad, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                           int64_t first_col, int64_t columns, float factor, const float (&acc)[N][4]) {
  bool is_nan = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = first + lane() / 4 + 8 * r;
    if (row >= seqlen) continue;
    In* const to = grad.row<In>(b, h, row);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int64_t col = first_col + 8 * n + lane() % 4 * 2;
      if (col >= columns) continue;
      const float left = acc[n][2 * r] * factor, right = acc[n][2 * r + 1] * factor;
      is_nan |= left != left || right != right;
      *reinterpret_cast<uint32_t*>(to + col) = ptx::pack<In>(left, right);
    }
  }
  return is_nan;
}

template <class C, class Functions = NoFunctions>
__global__ void __launch_bounds__(C::kThreads, 1)
    backward_kernel(const BackwardParams call, const BackwardWorkspace w, const Functions functions) {
  using In = typename C::In;
  if (!C::Gpu::kHasCode) return __trap();
  auto& shared = shared_memory<BackwardMemory<C>, C::Gpu::kSharedBytes>();

  // The keys of this block. If blocks add in turns, the last keys of a head are first. In a causal call few queries see
  // these keys, so the waits are short.
  const bool in_turns = call.dq && call.deterministic;
  int task = blockIdx.x;
  if (in_turns) {
    if (threadIdx.x == 0) shared.ticket = ptx::draw_ticket(w.ticket);
    __syncthreads();  // publishes the ticket to all threads
    task = shared.ticket;
  }
  const int key_blocks = ceil_div(call.sizes.seqlen_k, C::kBlockK), heads_kv = call.sizes.heads_kv;
  const int head_kv = task / key_blocks, b = head_kv / heads_kv, h_kv = head_kv % heads_kv;
  const int key_block = in_turns ? key_blocks - 1 - task % key_blocks : task % key_blocks;
  const BackwardParams& p = call_of_block<C>(call, b);
  const Sizes& z = p.sizes;
  const int j0 = key_block * C::kBlockK;
  const int j_end = static_cast<int>(smaller<int64_t>(j0 + C::kBlockK, z.seqlen_k));

  // The steps of the block: each query tile that sees one of the keys, for each head of the group. There are none if
  // the sequence has fewer keys. An int is enough to number all tiles that fit in memory.
  const int group = z.heads / z.heads_kv;
  const QueryGradientTiles<C::kPacked> dq_tiles(call, p, C::kBlockQ);
  const Range seen = visible_queries(p.band.without_chunks(), j0, j_end, z.seqlen_q);
  const int first_tile = seen.begin / C::kBlockQ;
  const int end_tile = j0 < j_end && seen.begin < seen.end ? ceil_div(seen.end, C::kBlockQ) : first_tile;
  auto steps = functions.template steps<C>(p, b, h_kv * group, group, j0, first_tile, end_tile);
  const auto place = [&](const auto& step) {
    return TransposedPosition<C>{b, h_kv * group + step.head, step.tile * C::kBlockQ, j0};
  };

  const auto load_q = [&](const auto& step, int buffer) {
    if (step.head < group) {
      const TransposedPosition<C> at = place(step);
      shared.q[buffer].template load_async<C::kThreads>(p.q, b, at.h, at.i0, z.seqlen_q, z.head_dim);
      shared.terms[buffer].load_async(w.simt.rows, p.lse_index(b, at.h, at.i0), z.seqlen_q - at.i0);
    }
    ptx::cp_async_commit();  // ends the group of q; also an empty one, because the waits count groups
  };
  const auto load_dout = [&](const auto& step) {
    if (step.head < group) {
      const TransposedPosition<C> at = place(step);
      shared.dout.template load_async<C::kThreads>(p.dout, b, at.h, at.i0, z.seqlen_q, z.head_dim_v);
    }
    ptx::cp_async_commit();  // ends the group of dout
  };

  auto step = steps.first();
  const bool has_steps = (step.head) < group;
  if (has_steps) {
    shared.k.template load_async<C::kThreads>(p.k, b, h_kv, j0, z.seqlen_k, z.head_dim);
    if constexpr (C::kHeldColumns > 0)
      shared.last_v().template load_async<C::kThreads>(p.v, b, h_kv, j0, z.seqlen_k, z.head_dim_v,
                                                       C::kStoredColumns);
    load_q(step, 0);  // in one group with k
    shared.v.template load_async<C::kThreads>(p.v, b, h_kv, j0, z.seqlen_k, z.head_dim_v);
    load_dout(step);  // in one group with v
  }
  HeldValues<C> last_v;
  if constexpr (C::kHeldColumns > 0) {
    if (has_steps) {
      ptx::cp_async_wait<1>();  // this thread's part of v's last columns has landed
      __syncthreads();          // the parts of all threads have landed
      last_v.load(shared);
    }
  }

  float dk[C::kGradColumns / 8][4] = {}, dv[C::kGradColumns / 8][4] = {};
  for (int buffer = 0; (step.head) < group; buffer ^= C::kQBuffers - 1) {
    const auto at = functions.template shown<C::kColumns>(p, step, place(step));
    const auto next = steps.after(step);
    const int i_end = static_cast<int>(smaller<int64_t>(at.i0 + C::kBlockQ, z.seqlen_q));
    const bool tail = j_end < j0 + C::kBlockK;
    const bool partial = (!C::kPlain && call.mask) || tail || functions.may_hide(step) ||
                         !band_covers(p.band.without_chunks(), at.i0, i_end, j0, j_end);

    ptx::cp_async_wait<C::kLater>();  // this thread's part of q has landed; dout may be in flight
    __syncthreads();  // all parts have landed; all have read the other q, P, dS and v's last columns
    if constexpr (C::kQBuffers == 2) load_q(next, buffer ^ 1);

    float products[C::kColumns][4] = {};
    multiply_rows<C::kUnrolled>(shared.k, C::first_key(), shared.q[buffer], C::first_query(), products);
    Probs<C::kColumns> probs;
    recompute_scores<C>(p, w.score_scale, at, partial, products, probs);
    typename Functions::template OldScores<C::kColumns> old;
    functions.recompute_new_scores(p, at, products, probs.gated, probs.attends, old);
    recompute_probs<C>(p, at, shared.terms[buffer], products, probs);
    if constexpr (C::kSharers > 1) store_scores<C>(probs.packed, shared.probs());

    ptx::cp_async_wait<1>();  // this thread's part of dout has landed; the next q may be in flight
    __syncthreads();          // all parts have landed; P is complete
    add_gradient<C>(probs.packed, shared.probs(), shared.dout, dv);
    float dprobs[C::kColumns][4] = {};
    multiply_rows<C::kUnrolled>(shared.v, C::first_key(), shared.dout, C::first_query(), dprobs);
    last_v.multiply(shared, dprobs);
    uint32_t dscores[C::kColumns / 2][4];
    finish_dscores<C>(w.keep_scale, shared.terms[buffer], probs, dprobs, dscores,
                      [&] { functions.change_gradients(p, at, old, dprobs); });
    store_scores<C>(dscores, shared.dscores());

    __syncthreads();  // dS is complete; all have read dout
    load_dout(next);
    add_gradient<C>(dscores, shared.dscores(), shared.q[buffer], dk);
    if constexpr (C::kQBuffers == 1) {
      __syncthreads();  // all have read q and its terms
      load_q(next, 0);  // in flight during dQ
    }
    if (call.dq) {
      int turn = -1;
      if (in_turns)
        turn = functions.template blocks_between<C>(
            p, at, i_end, key_block,
            (visible_keys(p.band.without_chunks(), at.i0, i_end, z.seqlen_k).end - 1) / C::kBlockK);
      add_query_gradient(shared, w, dq_tiles(b, at.h, at.i0 / C::kBlockQ), turn);
    }
    step = next;
  }

  bool has_nan = false;
  const int64_t first = j0 + C::first_key();
  const int col = C::first_column();
  // Computes the params again, because the loop has too few registers to keep them.
  const BackwardParams& results = call_of_block<C>(call, b);
  if (call.dk)
    has_nan |= store_rows<In>(results.dk, b, h_kv, first, z.seqlen_k, col, z.head_dim, float(p.scale), dk);
  if (call.dv)
    has_nan |= store_rows<In>(results.dv, b, h_kv, first, z.seqlen_k, col, z.head_dim_v, w.keep_scale, dv);
  const bool flag = __syncthreads_or(has_nan);  // one flag for all rows of the block
  const int64_t flags = NanFlags::tiles(call.sizes.seqlen_k), flag_tile = j0 / kFlaggedRows + threadIdx.x;
  if (threadIdx.x < C::kBlockK / kFlaggedRows && flag_tile < flags)
    w.flags.keys[head_kv * flags + flag_tile] = flag;
}

// Rounds dq. A block computes the query rows of one flag.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    dq_kernel(const BackwardParams call, const BackwardWorkspace w) {
  using Gradient = QueryGradient<C>;
  if (!C::Gpu::kHasCode) return __trap();
  const int64_t flags = NanFlags::tiles(call.sizes.seqlen_q), head = blockIdx.x / flags;
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads;
  const BackwardParams& p = call_of_block<C>(call, b);
  const Sizes& z = p.sizes;
  const QueryGradientTiles<C::kPacked> dq_tiles(call, p, C::kBlockQ);
  bool has_nan = false;
  for (int part = 0; part < kFlaggedRows / C::kBlockQ; ++part) {
    const int64_t i0 = blockIdx.x % flags * kFlaggedRows + part * C::kBlockQ;
    if (i0 >= z.seqlen_q) break;
    Gradient dq;
    const float* const sums = Gradient::sums(w, dq_tiles(b, h, i0 / C::kBlockQ).sums);
#pragma unroll
    for (int n = 0; n < Gradient::kAccumulators; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dq.acc[n][e] = sums[(4 * n + e) * 32];
    has_nan |= store_rows<typename C::In>(p.dq, b, h, i0 + Gradient::first_row(), z.seqlen_q,
                                          Gradient::first_col(), z.head_dim, float(p.scale), dq.acc);
  }
  const bool flag = __syncthreads_or(has_nan);  // one flag for all rows of the block
  if (threadIdx.x == 0) w.flags.queries[blockIdx.x] = flag;
}

}  // namespace flash_attn_ext::cuda::sm80
