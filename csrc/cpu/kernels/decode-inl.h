// Forward for few queries against many keys, where reading K and V once is what takes the time:
// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
//
// The query heads that share a key head are rows of one tile, so that their keys and values are read once.
// The keys are cut into `splits` that leave (O, m, l); merge_row() adds them in order. How many there are
// depends on the lengths and the number of key heads alone, so results depend neither on the number of
// threads nor on the batch. A task is one split of one key head, or, where threads are few, several that follow each
// other; and of several heads, where their rows lie side by side in memory, which then is read in its order.
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
  int64_t rows = 0;  // of all

  SplitResult<T> of(int64_t b, int64_t h_kv, const DecodePlan& plan) const {
    const int64_t rows = plan.splits * plan.rows;
    return all.skip((first_row ? first_row[b] : b * heads_kv * rows) + h_kv * rows, d_v);
  }
};

template <class T>
SplitResults<T> plan_split_results(Arena& arena, const AttentionParams& call) {
  const Sizes& z = call.sizes;
  SplitResults<T> r{{}, nullptr, z.heads_kv, decode_columns<T>(z.head_dim_v)};
  auto add_rows_of = [&](const AttentionParams& p) {
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodePlan plan = plan_decode<T>(p);
    r.rows += p.sizes.batch * z.heads_kv * plan.splits * plan.rows;
  };
  if (call.varlen) {
    int64_t* first_row = arena.take<int64_t>(z.batch);
    for (int64_t b = 0; b < z.batch; ++b) {
      if (first_row) first_row[b] = r.rows;
      add_rows_of(of_sequence(call, b));
    }
    r.first_row = first_row;
  } else {
    add_rows_of(call);
  }
  r.all.out = arena.take<T>(r.rows * r.d_v);
  r.all.row_max = arena.take<T>(r.rows);
  r.all.row_sum = arena.take<T>(r.rows);
  return r;
}

// A task: some splits of some key heads of a sequence.
struct DecodeTask {
  int64_t b;
  HeadRange heads;
  Range splits;
};

// How many key heads and splits a task takes. It changes no bit.
struct DecodeGrouping {
  int64_t heads = 1, splits = 1;
  int64_t rows = 1;            // of a key head, in the sequence that has most
  bool leaves_splits = false;  // some sequence's are more than a task takes: merge_all_splits() adds them

  int64_t tasks_of_heads(const DecodePlan& plan) const { return ceil_div(plan.splits, splits); }
  int64_t count(const AttentionParams& p, const DecodePlan& plan) const {
    return p.sizes.heads_kv / heads * tasks_of_heads(plan);
  }
  DecodeTask at(const AttentionParams& p, const DecodePlan& plan, const TaskList::Task& task) const {
    const int64_t per_batch = count(p, plan), n = task.index % per_batch;
    const int64_t first = n % tasks_of_heads(plan) * splits;
    return {task.b + task.index / per_batch,
            {n / tasks_of_heads(plan) * heads, heads},
            {first, std::min(first + splits, plan.splits)}};
  }
};

// As many as leave four tasks for each thread, none of them larger than its share of the work.
template <class T>
DecodeGrouping group_decode(const AttentionParams& call, int threads) {
  constexpr int64_t kMostRows = 256;
  const Sizes& z = call.sizes;
  double work = 0, heaviest = 1;  // of one head; of one split of it
  int64_t splits = 1;
  DecodeGrouping g;
  auto add = [&](const AttentionParams& p) {
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodePlan plan = plan_decode<T>(p);
    work +=
        static_cast<double>(p.sizes.batch * plan.rows) * static_cast<double>(plan.splits * plan.split_keys);
    heaviest = std::max(heaviest, static_cast<double>(plan.rows) * static_cast<double>(plan.split_keys));
    g.rows = std::max(g.rows, plan.rows);
    splits = std::max(splits, plan.splits);
  };
  if (call.varlen)
    for (int64_t b = 0; b < z.batch; ++b) add(of_sequence(call, b));
  else
    add(call);
  const double share = work * static_cast<double>(z.heads_kv) / (4.0 * threads);
  const int64_t most = std::max<int64_t>(static_cast<int64_t>(share / heaviest), 1);
  if (call.k.stride_h < call.k.stride_s) {
    g.heads = std::min({most, z.heads_kv, std::max<int64_t>(kMostRows / g.rows, 1)});
    while (z.heads_kv % g.heads != 0) --g.heads;
  }
  g.splits = ceil_div(splits, ceil_div(splits, std::max<int64_t>(most / g.heads, 1)));
  g.leaves_splits = splits > g.splits;
  return g;
}

// Whether a row's terms e^(S - unified) kept the precision of e^(S - m): no overflow, even of a sum of 2^31
// of them, and no loss to underflow. NaN is in range: it is the right answer then.
template <class T>
inline bool unified_max_fits(T row_max, T unified) {
  const T limit = static_cast<T>(Exp2<T>::kHighest * kLn2 / 2);
  return row_max == kNegInf<T> || !(std::abs(row_max - unified) > limit);
}

template <class In, class T>
void load_decode_queries(const AttentionParams& p, const DecodeScratch<In, T>& s, const DecodeTask& task,
                         int64_t rows) {
  const int64_t group = p.sizes.heads / p.sizes.heads_kv, seqlen_q = p.sizes.seqlen_q;
  for (int64_t n = 0; n < task.heads.count; ++n) {
    for (int64_t row = 0; row < rows; ++row) {
      const In* q = p.q.row<In>(task.b, (task.heads.first + n) * group + row / seqlen_q, row % seqlen_q);
      s.products.load_query(p, n * rows + row, q);
      if constexpr (DecodeBytes<In>::kExists)
        if (s.bytes.q) s.bytes.load_query(p, n * rows + row, q);
    }
    s.products.finish_queries(p, n, rows);
  }
}

// One split of the task's key heads; it fills its own part of their results.
template <class In, class T>
void decode_split(const AttentionParams& p, const DecodePlan& plan, const DecodeScratch<In, T>& s,
                  const DecodeTask& task, const SplitResults<T>& results, int64_t split) {
  const Sizes& z = p.sizes;
  const int64_t b = task.b;
  const HeadRange heads = task.heads;
  const int64_t block_k = decode_block_k<T>(), rows = plan.rows, d_v = decode_columns<T>(z.head_dim_v);
  const auto end_of = [&](int64_t n) {
    return std::min(plan.keys.begin + (n + 1) * plan.split_keys, plan.keys.end);
  };
  const int64_t begin = plan.keys.begin + split * plan.split_keys, end = end_of(split),
                end_of_task = end_of(task.splits.end - 1);
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
      return tile_source<In>(p, p.k, b, j0, std::min(block_k, end_of_task - j0), z.head_dim);
    };
    TileSource source = keys_from(begin);
    for (int64_t j0 = begin; j0 < end; j0 += block_k) {
      const TileSource next = keys_from(std::min(j0 + block_k, end_of_task));
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

// O and lse of one row of a key head from its splits, added in order.
template <class In, class T>
void merge_row(const AttentionParams& p, const DecodePlan& plan, int64_t b, int64_t h_kv, int64_t row,
               const SplitResult<T>& first) {  // the others are added to it
  constexpr int L = kLanes<T>;
  const Sizes& z = p.sizes;
  const int64_t rows = plan.rows, d_v = decode_columns<T>(z.head_dim_v);
  const int64_t h = h_kv * (z.heads / z.heads_kv) + row / z.seqlen_q, i = row % z.seqlen_q;
  const RowStart<T> start = start_of_row<T>(p.sink, b, h);
  T highest = start.max;
  for (int64_t n = 0; n < plan.splits; ++n) highest = std::max(highest, first.row_max[n * rows + row]);
  const T reference = highest == kNegInf<T> ? T(0) : highest;
  T* out = first.out + row * d_v;
  T sum = start.sum * std::exp(start.max - reference);
  for (int64_t n = 0; n < plan.splits; ++n) {
    const T factor = std::exp(first.row_max[n * rows + row] - reference);
    sum += first.row_sum[n * rows + row] * factor;
    for (int64_t c = 0; c < d_v; c += L) {
      const Vec<T> part = load<T>(out + n * rows * d_v + c) * factor;
      store<T>(out + c, n == 0 ? part : load<T>(out + c) + part);
    }
  }
  T* lse = static_cast<T*>(p.lse) + p.lse_index(b, h, i);
  finish_row<In, T>(p.out.row<In>(b, h, i), out, z.head_dim_v, highest, T(1), sum, *lse);
}

template <class In, class T>
void decode_task(const AttentionParams& p, const DecodePlan& plan, const DecodeScratch<In, T>& s,
                 const DecodeTask& task, const SplitResults<T>& results) {
  load_decode_queries<In, T>(p, s, task, plan.rows);
  for (int64_t split = task.splits.begin; split < task.splits.end; ++split)
    decode_split<In, T>(p, plan, s, task, results, split);
  if (task.splits.end - task.splits.begin < plan.splits) return;  // merge_all_splits() does this then
  for (int64_t h = task.heads.first; h < task.heads.first + task.heads.count; ++h)
    for (int64_t row = 0; row < plan.rows; ++row)
      merge_row<In, T>(p, plan, task.b, h, row, results.of(task.b, h, plan));
}

// What decode_task() has left, row by row.
template <class In, class T>
void merge_all_splits(const AttentionParams& call, const DecodeGrouping& tasks,
                      const SplitResults<T>& results, const Parallel& parallel) {
  constexpr int64_t kFew = 32768;  // elements that one thread adds while others would start
  const int64_t heads_kv = call.sizes.heads_kv;
  const Parallel threads{results.rows * results.d_v < kFew ? 1 : parallel.threads, parallel.run};
  for_each_task(threads, call.sizes.batch * heads_kv * tasks.rows, [&](int64_t n, int) {
    const int64_t row = n % tasks.rows, head = n / tasks.rows, h_kv = head % heads_kv, b = head / heads_kv;
    const AttentionParams p = of_sequence(call, b);
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodePlan plan = plan_decode<T>(p);
    if (plan.splits <= tasks.splits || row >= plan.rows) return;  // done, or no such row
    merge_row<In, T>(p, plan, b, h_kv, row, results.of(b, h_kv, plan));
  });
}
