// Forward for few queries against many keys, where reading K and V once is what takes the time:
// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
//
// The query heads that share a key head are rows of one tile, so that their keys and values are read once.
// The keys are cut into `splits` that leave (O, m, l); merge_splits() adds them in order. How many there are
// depends on the lengths and the number of key heads alone, so results depend neither on the number of
// threads nor on the batch. A task is one split of one key head; or of several, where their rows lie side by side
// in memory, which then is read in its order.
//
// With a unified maximum (FlashDecoding++, Hong et al. 2023) every split takes exp against one constant in
// place of its running maximum, and is computed again, safely, if a row's maximum turns out to be too far
// from it.
#pragma once

#include "decode_tile-inl.h"

inline bool is_decode(const AttentionParams& p) { return is_decode(p, kDecodeMaxQueries); }
// Whether some packed sequence of the call may be decoded.
inline bool may_decode(const AttentionParams& call) { return call.varlen || is_decode(call); }

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

// Whether a row's terms e^(S - unified) kept the precision of e^(S - m): no overflow, even of a sum of 2^31
// of them, and no loss to underflow. NaN is in range: it is the right answer then.
template <class T>
inline bool unified_max_fits(T row_max, T unified) {
  const T limit = static_cast<T>(Exp2<T>::kHighest * kLn2 / 2);
  return row_max == kNegInf<T> || !(std::abs(row_max - unified) > limit);
}

// One split of some key heads; it fills its own part of their results.
template <class In, class T>
void decode_split(const AttentionParams& p, const DecodePlan& plan, const DecodeScratch<In, T>& s, int64_t b,
                  const HeadRange& heads, const SplitResults<T>& results, int64_t split) {
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv, block_k = decode_block_k<T>(), rows = plan.rows;
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  for (int64_t n = 0; n < heads.count; ++n) {
    for (int64_t row = 0; row < rows; ++row) {
      const In* q = p.q.row<In>(b, (heads.first + n) * group + row / z.seqlen_q, row % z.seqlen_q);
      s.products.load_query(p, n * rows + row, q);
      if constexpr (DecodeBytes<In>::kExists)
        if (s.bytes.q) s.bytes.load_query(p, n * rows + row, q);
    }
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
    const HeadRange some{heads.first + first, last - first};
    const auto keys_from = [&](int64_t j0) {
      return tile_source<In>(p, p.k, b, j0, std::min(block_k, end - j0), z.head_dim);
    };
    TileSource source = keys_from(begin);
    for (int64_t j0 = begin; j0 < end; j0 += block_k) {
      const TileSource next = keys_from(std::min(j0 + block_k, end));
      const DecodeTile<In, T> tile{p, s, b, some, first, j0, std::min(block_k, end - j0), unified};
      decode_tile<In, T>(tile, source, next, [&](int64_t n) { return result_of(first + n); });
      source = next;
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
