// Forward with integer products (SageAttention, Zhang et al. 2024): Q K^T in int8, P V in int16. It is algorithm 1 of
// forward-inl.h with rounded operands (int8_operands-inl.h).
//
// The softmax does not change if the mean of the keys is subtracted from each key. <q, mean> is added back to the scores,
// because softcap, sink and lse need the scores themselves.
//
// P of a tile is relative to the largest score of its row in the tile, with the factor 1 / 8192. Relative to the running
// maximum, a row with one large score would round all other probabilities to 0. The sums of 64 keys stay below 2^31:
// 64 * 8192 * 4095.
#pragma once

#include "int8_operands-inl.h"
#include "row_tiles-inl.h"
#include "softmax-inl.h"

constexpr float kToProbCode =
    0x1.8p10f;  // adding it rounds to a multiple of 2^-13, with the code in the low bits
constexpr float kProbFactor = 0x1p-13f;

struct Int8Scratch {
  Int8Queries queries;
  float* scores;    // [block_k][block_q]
  uint32_t* probs;  // [block_k / 2][block_q]   pairs of int16
  MaskTile<float> mask;
  float* out;           // [block_q][ld_v]
  float* row_max;       // [block_q]
  float* row_sum;       // [block_q]
  float* rescale;       // [block_q]
  float* prob_factors;  // [block_q]

  static Int8Scratch allocate(Arena& arena, const AttentionParams& p, const Int8Keys& keys) {
    const int64_t block_q = fitted(forward_tiling<float>(), p.sizes).block_q;
    Int8Scratch s;
    s.queries = Int8Queries::allocate(arena, keys, block_q);
    s.scores = arena.take<float>(kInt8BlockK * block_q);
    s.probs = arena.take<uint32_t>(kInt8BlockK / 2 * block_q);
    s.mask = allocate_mask_tile<float>(arena, p.mask, block_q, kInt8BlockK);
    s.out = arena.take<float>(block_q * keys.ld_v);
    for (float** row : {&s.row_max, &s.row_sum, &s.rescale, &s.prob_factors})
      *row = arena.take<float>(block_q);
    return s;
  }
};

// Writes P of a tile as pairs of int16 codes, relative to the largest score of each row in the tile. Updates m and l.
inline void int8_softmax(const TileFrame& f, float unit, const Int8Scratch& s) {
  constexpr int L = kLanes<float>;
  const float log2_unit = unit * float(kLog2E);
  const auto exp = [&](Vec<float> x) FA_INLINE_LAMBDA { return short_exp_scaled(x, log2_unit); };
  for (int64_t c = 0; c < f.ld; c += L) {
    const float* column = s.scores + c;
    const Vec<float> old_max = load<float>(s.row_max + c),
                     own_max = max_of_column<float>(column, f.keys, f.ld);
    const Vec<float> new_max = max<float>(old_max, own_max);
    const auto or_zero = [](Vec<float> m) { return m == kNegInf<float> ? Vec<float>{} : m; };
    const Vec<float> reference = or_zero(own_max);
    const auto code_of_key = [&](int64_t j) FA_INLINE_LAMBDA {
      return exp(load<float>(column + j * f.ld) - reference) + kToProbCode;
    };
    Vec<float> sum = {};
    const auto write = [&](int64_t j, Vec<float> first, Vec<float> second) FA_INLINE_LAMBDA {
      const Words32 pair = ((Words32)first & 0xffffu) | ((Words32)second << 16);
      store<float>(reinterpret_cast<float*>(s.probs + j / 2 * f.ld + c), (Vec<float>)pair);
      sum += (first - kToProbCode) + (second - kToProbCode);
    };
    int64_t j = 0;
    for (; j + 2 <= f.keys; j += 2) write(j, code_of_key(j), code_of_key(j + 1));
    if (j < f.keys) write(j, code_of_key(j), splat<float>(kToProbCode));
    const Vec<float> new_reference = or_zero(new_max);
    const Vec<float> factor =
        own_max == kNegInf<float> ? Vec<float>{} : exp_scaled<float>(own_max - new_reference, log2_unit);
    const Vec<float> rescale = exp_scaled<float>(old_max - new_reference, log2_unit);
    store<float>(s.row_max + c, new_max);
    store<float>(s.row_sum + c, load<float>(s.row_sum + c) * rescale + sum * factor);
    store<float>(s.rescale + c, rescale);
    store<float>(s.prob_factors + c, factor * kProbFactor);
  }
}

// Replaces the scores of a tile by P, as the product reads it.
inline void int8_probs_as_floats(const TileFrame& f, const Int8Scratch& s) {
  for (int64_t j = 0; j < f.keys; ++j)
    for (int64_t i = 0; i < f.ld; ++i)
      s.scores[j * f.ld + i] =
          s.prob_factors[i] * static_cast<float>(s.probs[j / 2 * f.ld + i] >> (j % 2 * 16) & 0xffff);
}

inline void int8_attend(const AttentionParams& p, const Int8Keys& keys, const Int8Scratch& s,
                        const TileFrame& f, float unit) {
  const MaskTile<float> mask = load_mask_tile<float>(p, f, s.mask);
  if (mask.masked == TileMask::kAll) return;
  const int64_t h_kv = p.sizes.kv_head(f.h), head = f.b * p.sizes.heads_kv + h_kv;
  const int64_t row = head * keys.rows + f.j0, tile = head * keys.count + f.j0 / kInt8BlockK;
  int8_scores({keys.words, keys.k + row * keys.stride, keys.stride, keys.k_factors + row, s.queries.words,
               s.queries.starts, s.queries.factors, s.queries.products, s.scores, f.ld},
              f.keys);
  const ScoreTile<float> score = finish_scores<float>(p, f, mask, s.scores, nullptr);
  int8_softmax(f, unit, s);
  int8_add_values({ceil_div(f.keys, 2), s.probs, f.ld, keys.v + tile * (kInt8BlockK / 2) * keys.ld_v,
                   keys.v_factors + tile * keys.ld_v, s.rescale, s.prob_factors, s.out, keys.ld_v},
                  f.queries);
  if (!keys.not_finite[tile]) return;
  int8_probs_as_floats(f, s);
  for_row_type<float>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    const Rows<Row> values{p.v.row<Row>(f.b, h_kv, f.j0), p.v.stride_s, p.sizes.head_dim_v};
    add_rows_not_finite<Row, float>(score, true, f.queries, s.scores, 1, f.ld, values, f.keys, s.out,
                                    keys.ld_v);
  });
}

inline void int8_query_block(const AttentionParams& p, const Int8Keys& keys, const Int8Scratch& s, int64_t b,
                             int64_t h, const Range& rows) {
  const int64_t i0 = rows.begin, queries = rows.end - rows.begin, ld = round_up_to_lanes<float>(queries);
  const float unit = score_unit<float>(p);
  for_row_type<float>(p.dtype, [&](auto element) {
    s.queries.load_rows<decltype(element)>(p, keys, b, h, i0, queries, ld,
                                           unit == 1 ? product_scale<float>(p) : 1.0f);
  });
  const RowStart<float> first = start_of_row<float>(p.sink, b, h, unit);
  std::fill(s.row_max, s.row_max + ld, first.max);
  std::fill(s.row_sum, s.row_sum + ld, first.sum);
  std::fill(s.out, s.out + queries * keys.ld_v, 0.0f);
  const Range seen = keys_of_tiles(p, i0, queries);
  for (int64_t j0 = seen.begin / kInt8BlockK * kInt8BlockK; j0 < seen.end; j0 += kInt8BlockK)
    int8_attend(p, keys, s, {b, h, i0, j0, queries, std::min(kInt8BlockK, seen.end - j0), ld, true}, unit);
  float* lse = static_cast<float*>(p.lse) + p.lse_index(b, h, i0);
  for_row_type<float>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    for (int64_t i = 0; i < queries; ++i)
      finish_row<Row, float>(p.out.row<Row>(b, h, i0 + i), s.out + i * keys.ld_v, p.sizes.head_dim_v,
                             s.row_max[i], unit, s.row_sum[i], lse[i]);
  });
}

struct Int8Workspace {
  Int8Keys keys;
  ThreadScratch scratch;

  static Int8Workspace allocate(Arena& arena, const AttentionParams& p, int threads) {
    Int8Workspace w;
    w.keys = Int8Keys::allocate(arena, p);
    w.scratch =
        ThreadScratch::allocate(arena, threads, [&](Arena& one) { Int8Scratch::allocate(one, p, w.keys); });
    return w;
  }
};

// why_not() refuses float64.
void run_int8_forward(const Int8Params& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const Int8Workspace w = Int8Workspace::allocate(arena, p, parallel.threads);
  const int64_t heads = p.sizes.batch * p.sizes.heads_kv;
  for_row_type<float>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    for_each_task(parallel, heads, [&](int64_t head, int) { w.keys.average<Row>(p, head); });
    for_each_task(parallel, heads * w.keys.count,
                  [&](int64_t n, int) { w.keys.round_tile<Row>(p, n / w.keys.count, n % w.keys.count); });
  });
  const RowTiles rows = row_tiles<float>(p);
  constexpr int64_t kFewTasks = 32;  // per thread; with more tasks, the blocks of a head follow each other
  const int64_t blocks = rows.count(), tasks = p.sizes.batch * p.sizes.heads * blocks;
  const HeadBlocks list(p.sizes, blocks, tasks < kFewTasks * parallel.threads ? tasks / blocks : 1);
  for_each_task(parallel, tasks, [&](int64_t n, int thread) {
    Arena own = w.scratch.of_thread(thread);
    const auto [b, h, n_from_last] = list.at({0, n});
    int8_query_block(p, w.keys, Int8Scratch::allocate(own, p, w.keys), b, h,
                     rows.at(blocks - 1 - n_from_last));
  });
}

size_t run_int8_forward_workspace(const Int8Params& p, int threads) {
  Arena arena(nullptr);
  Int8Workspace::allocate(arena, p, threads);
  return arena.used();
}

constexpr Int8Kernels kKernels = {FA_ISA_NAME, {run_int8_forward_workspace, run_int8_forward}};
