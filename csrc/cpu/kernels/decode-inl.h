// Forward for few queries against many keys, where reading K and V once is what takes the time:
// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
//
// The query heads that share a key head are rows of one tile, so that their keys and values are read once.
// The keys are cut into `splits` that leave (O, m, l); merge_splits() adds them in order. How many there are
// depends on the lengths and the number of key heads alone, so results depend neither on the number of
// threads nor on the batch. A task is one split of one key head; or of several, tile by tile in turn, where the
// rows of all heads lie side by side in memory: each read alone is a small piece of every page.
//
// With a unified maximum (FlashDecoding++, Hong et al. 2023) every split takes exp against one constant in
// place of its running maximum, and is computed again, safely, if a row's maximum turns out to be too far
// from it.
#pragma once

#include "cache_rows-inl.h"
#include "decode_products-inl.h"
#include "dropout_tile-inl.h"
#include "masked_gemm-inl.h"

inline bool is_decode(const AttentionParams& p) { return is_decode(p, kDecodeMaxQueries); }
// Whether some packed sequence of the call may be decoded.
inline bool may_decode(const AttentionParams& call) { return call.varlen || is_decode(call); }

template <class In, class T>
struct DecodeScratch {
  DecodeProducts<In, T> products;
  T* scores;  // [rows][block_k]   S, then P in place
  MaskTile<T> mask;
  T* dropout_tile;  // [S_q][block_k]
  In* finite_tile;  // [block_k][D_v]    V without the rows that are not finite
  In* key_copy;     // [block_k][D]      only if keys come from pages or 8 bits
  In* value_copy;   // [block_k][D_v]    likewise
  T* key_factors;   // [block_k]         only if keys are of 8 bits
  T* value_factors;
};

// How the keys of one key head are cut.
struct DecodePlan {
  int64_t rows, splits, split_keys;  // H / H_kv * S_q; pieces; keys in each
  Range keys;                        // whole blocks of those that some query sees
};

template <class T>
DecodePlan plan_decode(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  constexpr int64_t block_k = decode_block_k<T>();
  DecodePlan plan;
  plan.rows = z.heads / z.heads_kv * z.seqlen_q;
  plan.keys = visible_keys(p.band, 0, z.seqlen_q, z.seqlen_k);
  plan.keys.begin = plan.keys.begin / block_k * block_k;  // dropout's words come in pairs of keys
  const int64_t blocks = std::max<int64_t>((plan.keys.end - plan.keys.begin + block_k - 1) / block_k, 1);
  // Not by the batch: what else is in it changes no bit of a result.
  const int64_t by_shape =
      std::max(std::min(ceil_div(kDecodeTasks, z.heads_kv), ceil_div(blocks, kDecodeMinBlocks)),
               ceil_div(blocks, kDecodeMostBlocks));
  const KeySplits cut = split_keys(p, blocks, by_shape);
  plan.splits = cut.splits;
  plan.split_keys = cut.tiles_per_split * block_k;
  return plan;
}

// What one split leaves, or the splits of a key head, one behind the other.
template <class T>
struct SplitResult {
  T* out;      // [rows][D_v]  O, not yet divided by l
  T* row_max;  // [rows]       m
  T* row_sum;  // [rows]       l

  SplitResult skip(int64_t n, int64_t d_v) const { return {out + n * d_v, row_max + n, row_sum + n}; }
};

// What all splits of a call leave: [B][H_kv][splits], of sequences that are not decoded nothing.
template <class T>
struct SplitResults {
  SplitResult<T> all;
  const int64_t* first_row;  // [B] of a packed call
  int64_t heads_kv, d_v;

  SplitResult<T> of(int64_t b, int64_t h_kv, const DecodePlan& plan) const {
    const int64_t rows = plan.splits * plan.rows;
    return all.skip((first_row ? first_row[b] : b * heads_kv * rows) + h_kv * rows, d_v);
  }
};

template <class T>
SplitResults<T> plan_split_results(Arena& arena, const AttentionParams& call) {
  const Sizes& z = call.sizes;
  SplitResults<T> r{{}, nullptr, z.heads_kv, decode_columns<T>(z.head_dim_v)};
  int64_t rows = 0;
  auto add_rows_of = [&](const AttentionParams& p) {
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodePlan plan = plan_decode<T>(p);
    rows += p.sizes.batch * z.heads_kv * plan.splits * plan.rows;
  };
  if (call.varlen) {
    int64_t* first_row = arena.take<int64_t>(z.batch);
    for (int64_t b = 0; b < z.batch; ++b) {
      if (first_row) first_row[b] = rows;
      add_rows_of(of_sequence(call, b));
    }
    r.first_row = first_row;
  } else {
    add_rows_of(call);
  }
  r.all.out = arena.take<T>(rows * r.d_v);
  r.all.row_max = arena.take<T>(rows);
  r.all.row_sum = arena.take<T>(rows);
  return r;
}

// How many key heads a task has. It changes no bit: as many as leave two tasks for each thread, none of them larger than
// its share of the work.
template <class T>
int64_t decode_heads_of_task(const AttentionParams& call, int threads) {
  constexpr int64_t kMostRows = 256;
  const Sizes& z = call.sizes;
  if (call.k.stride_h >= call.k.stride_s) return 1;
  double work = 0, heaviest = 1;  // of one head; of one split of it
  int64_t rows = 1;
  auto add = [&](const AttentionParams& p) {
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodePlan plan = plan_decode<T>(p);
    work +=
        static_cast<double>(p.sizes.batch * plan.rows) * static_cast<double>(plan.splits * plan.split_keys);
    heaviest = std::max(heaviest, static_cast<double>(plan.rows) * static_cast<double>(plan.split_keys));
    rows = std::max(rows, plan.rows);
  };
  if (call.varlen)
    for (int64_t b = 0; b < z.batch; ++b) add(of_sequence(call, b));
  else
    add(call);
  const double share = work * static_cast<double>(z.heads_kv) / (2.0 * threads);
  int64_t heads = std::clamp<int64_t>(static_cast<int64_t>(share / heaviest), 1, z.heads_kv);
  heads = std::min(heads, std::max<int64_t>(kMostRows / rows, 1));
  while (z.heads_kv % heads != 0) --heads;
  return heads;
}

// A thread's scratch, for any sequence of the call and tasks of `heads` key heads.
template <class In, class T>
DecodeScratch<In, T> plan_decode_scratch(Arena& arena, const AttentionParams& call, int64_t heads) {
  const Sizes& z = call.sizes;
  const int64_t seqlen_q = is_decode(call, 0) ? z.seqlen_q : std::min(z.seqlen_q, kDecodeMaxQueries);
  const int64_t rows = z.heads / z.heads_kv * seqlen_q;
  const int64_t block_k = fitted(decode_block_k<T>(), z.seqlen_k);
  DecodeScratch<In, T> s;
  s.products = DecodeProducts<In, T>::plan(arena, call, rows, heads, block_k);
  s.scores = arena.take<T>(rows * block_k);
  // A band may hide keys only if it is bounded.
  const bool may_mask = call.mask || call.band.left < Band::kUnbounded || call.band.right < Band::kUnbounded;
  s.mask = plan_mask_tile<T>(arena, call.mask, seqlen_q, block_k);
  s.dropout_tile = call.dropout ? arena.take<T>(seqlen_q * block_k) : nullptr;
  s.finite_tile = may_mask ? arena.take<In>(block_k * z.head_dim_v) : nullptr;
  s.key_copy = copies_rows(call) ? arena.take<In>(block_k * z.head_dim) : nullptr;
  s.value_copy = copies_rows(call) ? arena.take<In>(block_k * z.head_dim_v) : nullptr;
  const bool is_8_bit = call.varlen.cache.dtype != CacheDType::kOfQuery;
  s.key_factors = is_8_bit ? arena.take<T>(block_k) : nullptr;
  s.value_factors = is_8_bit ? arena.take<T>(block_k) : nullptr;
  return s;
}

// One row of a tile: P = e^(S - m') in place, and its share of m, l and O. `unified` (or null) takes the
// place of m'.
template <class T>
inline void decode_softmax_row(T* scores, int64_t ld, const T* unified, T& row_max, T& row_sum, T* out,
                               int64_t d_v) {
  constexpr int L = kLanes<T>;
  Vec<T> highest = splat<T>(row_max);
  for (int64_t c = 0; c < ld; c += L) highest = max<T>(highest, load<T>(scores + c));
  const T new_max = max_lanes<T>(highest);
  const T reference = unified ? *unified : new_max == kNegInf<T> ? T(0) : new_max;
  Vec<T> sum = {};
  for (int64_t c = 0; c < ld; c += L) {
    const Vec<T> prob = exp<T>(load<T>(scores + c) - reference);
    store<T>(scores + c, prob);
    sum += prob;
  }
  const T factor = unified ? T(1) : exp<T>(splat<T>(row_max - reference))[0];
  row_sum = row_sum * factor + sum_lanes<T>(sum);
  row_max = new_max;
  if (factor == T(1)) return;
  for (int64_t c = 0; c < d_v; c += L) store<T>(out + c, load<T>(out + c) * factor);
}

// Whether a row's terms e^(S - unified) kept the precision of e^(S - m): no overflow, even of a sum of 2^31
// of them, and no loss to underflow. NaN is in range: it is the right answer then.
template <class T>
inline bool unified_max_fits(T row_max, T unified) {
  const T limit = static_cast<T>(Exp2<T>::kHighest * kLn2 / 2);
  return row_max == kNegInf<T> || !(std::abs(row_max - unified) > limit);
}

template <class In, class T>
bool tile_is_finite(const TileRows<In>& tile, int64_t keys) {
  for (int64_t n = 0; n < keys; n += kChunkRows)
    if (!rows_are_finite<In, T>(tile.from(n), std::min(kChunkRows, keys - n))) return false;
  return true;
}

// A copy of `keys` rows with zeros for those that are not finite.
template <class In, class T>
TileRows<In> finite_rows(const TileRows<In>& from, int64_t keys, In* copy) {
  for (int64_t n = 0; n < keys; ++n) {
    In* to = copy + n * from.cols;
    std::copy(from.row(n), from.row(n) + from.cols, to);
    if (!rows_are_finite<In, T>(Rows<In>{to, 0, from.cols}, 1)) std::fill(to, to + from.cols, In{});
  }
  return tile_rows<In>({copy, from.cols, from.cols});
}

template <class T>
inline void multiply_lanes(T* row, const T* factors, int64_t ld) {
  for (int64_t c = 0; c < ld; c += kLanes<T>) store<T>(row + c, load<T>(row + c) * load<T>(factors + c));
}

// `n`: which of the task's key heads h_kv is. `next` is where the rows lie that are read after this tile.
template <class In, class T>
void decode_tile(const AttentionParams& p, const DecodeScratch<In, T>& s, int64_t b, int64_t h_kv, int64_t n,
                 int64_t j0, int64_t keys, const T* unified, const SplitResult<T>& r,
                 const SourceRows& next) {
  const Sizes& z = p.sizes;
  const CacheParams& cache = p.varlen.cache;
  const int64_t group = z.heads / z.heads_kv, rows = group * z.seqlen_q, ld = round_up_to_lanes<T>(keys);
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  const SourceRows k_source = source_rows<In>(p, p.k, b, h_kv, j0, keys, z.head_dim);
  const SourceRows v_source = source_rows<In>(p, p.v, b, h_kv, j0, keys, z.head_dim_v);
  const DecodeRows<In, T> k = decode_rows<In, T>(p, p.k, cache.k_scale, k_source, b, h_kv, j0, keys,
                                                 z.head_dim, ld, s.key_copy, s.key_factors, v_source);
  const DecodeRows<In, T> v = decode_rows<In, T>(p, p.v, cache.v_scale, v_source, b, h_kv, j0, keys,
                                                 z.head_dim_v, ld, s.value_copy, s.value_factors, next);
  const SourceRows nothing;  // rows of 8 bits were asked for while others were copied
  const bool in_place = cache.dtype == CacheDType::kOfQuery;
  const SourceRows &values_next = in_place ? v_source : nothing, &keys_next = in_place ? next : nothing;

  const bool all_at_once = fills_lanes<T>(rows);
  if (all_at_once) {
    s.products.all_scores(n, rows, k.rows, keys, s.scores, ld, values_next);
  } else {
    for_each_few_rows<T>(rows, [&](int64_t row, auto count) {
      s.products.template scores<count.value>(n * rows + row, k.rows, keys, s.scores + row * ld, ld,
                                              row == 0 ? values_next : nothing);
    });
  }
  if (k.factors)
    for (int64_t row = 0; row < rows; ++row) multiply_lanes<T>(s.scores + row * ld, k.factors, ld);

  const bool may_mask = is_masked_before(p, j0 + keys) || !band_covers(p.band, 0, z.seqlen_q, j0, j0 + keys);
  const bool isolate = may_mask && !tile_is_finite<In, T>(v.rows, keys);
  for (int64_t g = 0; g < group; ++g) {
    const TileFrame f{b, h_kv * group + g, 0, j0, z.seqlen_q, keys, ld, false};
    T* scores = s.scores + g * z.seqlen_q * ld;
    const ScoreTile<T> score = finish_scores<T>(p, f, load_mask_tile<T>(p, f, s.mask), scores, nullptr);
    for (int64_t i = 0; i < z.seqlen_q; ++i) {
      const int64_t row = g * z.seqlen_q + i;
      decode_softmax_row<T>(scores + i * ld, ld, unified, r.row_max[row], r.row_sum[row], r.out + row * d_v,
                            d_v);
    }
    if (p.dropout) {  // after the row sum: dropout acts on the normalised P
      load_dropout_tile<T>(p, f, s.dropout_tile);
      multiply_rows<T>(scores, s.dropout_tile, z.seqlen_q * ld);
    }
    if (v.factors)
      for (int64_t i = 0; i < z.seqlen_q; ++i) multiply_lanes<T>(scores + i * ld, v.factors, ld);
    if (isolate)
      add_rows_not_finite<In, T>(score, false, z.seqlen_q, scores, ld, 1, v.rows, keys,
                                 r.out + g * z.seqlen_q * d_v, d_v);
  }
  const TileRows<In> values = isolate ? finite_rows<In, T>(v.rows, keys, s.finite_tile) : v.rows;
  if (all_at_once) return s.products.add_all_values(rows, s.scores, ld, values, keys, r.out, d_v, keys_next);
  for_each_few_rows<T>(rows, [&](int64_t row, auto count) {
    s.products.template add_values<count.value>(s.scores + row * ld, ld, values, keys, r.out + row * d_v, d_v,
                                                row == 0 ? keys_next : nothing);
  });
}

// The key heads of one task.
struct DecodeHeads {
  int64_t first, count;
};

// One split of some key heads; it fills its own part of their results.
template <class In, class T>
void decode_split(const AttentionParams& p, const DecodePlan& plan, const DecodeScratch<In, T>& s, int64_t b,
                  const DecodeHeads& heads, const SplitResults<T>& results, int64_t split) {
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv, block_k = decode_block_k<T>(), rows = plan.rows;
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  for (int64_t n = 0; n < heads.count; ++n) {
    for (int64_t row = 0; row < rows; ++row)
      s.products.load_query(p, n * rows + row,
                            p.q.row<In>(b, (heads.first + n) * group + row / z.seqlen_q, row % z.seqlen_q));
    s.products.finish_queries(p, n, rows);
  }

  const int64_t begin = plan.keys.begin + split * plan.split_keys,
                end = std::min(begin + plan.split_keys, plan.keys.end);
  const auto result_of = [&](int64_t n) {
    return results.of(b, heads.first + n, plan).skip(split * rows, d_v);
  };
  auto run = [&](const T* unified, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      const SplitResult<T> r = result_of(n);
      std::fill(r.out, r.out + rows * d_v, T(0));
      std::fill(r.row_max, r.row_max + rows, kNegInf<T>);
      std::fill(r.row_sum, r.row_sum + rows, T(0));
    }
    for (int64_t j0 = begin; j0 < end; j0 += block_k)
      for (int64_t n = first; n < last; ++n) {
        const int64_t next_n = n + 1 < last ? n + 1 : first, next_j = n + 1 < last ? j0 : j0 + block_k;
        SourceRows next;
        if (next_j < end)
          next = source_rows<In>(p, p.k, b, heads.first + next_n, next_j, std::min(block_k, end - next_j),
                                 z.head_dim);
        decode_tile<In, T>(p, s, b, heads.first + n, n, j0, std::min(block_k, end - j0), unified,
                           result_of(n), next);
      }
  };
  if (!p.decode.has_unified_max) return run(nullptr, 0, heads.count);
  constexpr double kLargest = std::numeric_limits<T>::max();  // of the finite guesses that T holds
  const T unified = static_cast<T>(std::clamp(p.decode.unified_max, -kLargest, kLargest));
  run(&unified, 0, heads.count);
  for (int64_t n = 0; n < heads.count; ++n) {
    const SplitResult<T> r = result_of(n);
    if (!std::all_of(r.row_max, r.row_max + rows, [&](T m) { return unified_max_fits<T>(m, unified); })) {
      run(nullptr, n, n + 1);
      continue;
    }
    // What O and l are relative to. A row that sees no key of this split has no maximum: other splits, computed
    // again, may have one far below the guess.
    for (int64_t row = 0; row < rows; ++row)
      if (r.row_sum[row] != T(0)) r.row_max[row] = unified;
  }
}

// O and lse of one key head's queries from its splits, added in order.
template <class In, class T>
void merge_splits(const AttentionParams& p, const DecodePlan& plan, int64_t b, int64_t h_kv,
                  const SplitResult<T>& first) {  // the others are added to it
  constexpr int L = kLanes<T>;
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv, rows = plan.rows, d_v = decode_columns<T>(z.head_dim_v);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t h = h_kv * group + row / z.seqlen_q, i = row % z.seqlen_q;
    const RowStart<T> start = start_of_row<T>(p.sink, b, h);
    T highest = start.max;
    for (int64_t n = 0; n < plan.splits; ++n) highest = std::max(highest, first.row_max[n * rows + row]);
    const T reference = highest == kNegInf<T> ? T(0) : highest;
    T* out = first.out + row * d_v;
    T sum = start.sum * exp<T>(splat<T>(start.max - reference))[0];
    for (int64_t n = 0; n < plan.splits; ++n) {
      const T factor = exp<T>(splat<T>(first.row_max[n * rows + row] - reference))[0];
      sum += first.row_sum[n * rows + row] * factor;
      for (int64_t c = 0; c < d_v; c += L) {
        const Vec<T> part = load<T>(out + n * rows * d_v + c) * factor;
        store<T>(out + c, n == 0 ? part : load<T>(out + c) + part);
      }
    }
    T* lse = static_cast<T*>(p.lse) + p.statistics_row(b, h, i);
    finish_row<In, T>(p.out.row<In>(b, h, i), out, z.head_dim_v, highest, T(1), sum, *lse);
  }
}

template <class In, class T>
void merge_all_splits(const AttentionParams& call, const SplitResults<T>& results, const Parallel& parallel) {
  const int64_t heads_kv = call.sizes.heads_kv;
  for_each_task(parallel, call.sizes.batch * heads_kv, [&](int64_t kv_head, int) {
    const int64_t b = kv_head / heads_kv, h_kv = kv_head % heads_kv;
    const AttentionParams p = of_sequence(call, b);
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodePlan plan = plan_decode<T>(p);
    merge_splits<In, T>(p, plan, b, h_kv, results.of(b, h_kv, plan));
  });
}
