// Forward for few queries against many keys: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023). It takes about as long as
// reading K and V once.
//
// The query heads that share a key head are the rows of one tile, so K and V are read once for all of them. The keys
// are cut into `splits`. Each split stores (O, m, l), and merge_row() adds the splits in order. The number of splits
// depends only on the lengths and the number of key heads. So results depend neither on the number of threads nor on
// the batch. A task is one split of one key head. With few threads a task is several consecutive splits. It has several
// heads if their rows are adjacent in memory, so that memory is read in order.
//
// With a unified maximum (FlashDecoding++, Hong et al. 2023) every split computes e^(S - constant) instead of e^(S -
// running maximum). If a row's maximum is too far from the constant, the split is computed again with the running
// maximum.
#pragma once

#include "decode_tile-inl.h"

// Returns the number of queries up to which the decode kernel is faster, if only the softmax follows the product. It multiplies
// the rows of a whole group at once, prefetches keys, and splits them.
inline int64_t most_queries_of_chunk(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  const Range seen = visible_keys(p.band, 0, z.seqlen_q, z.seqlen_k);
  const int64_t bytes = (seen.end - seen.begin) * (z.head_dim + z.head_dim_v) * bytes_of(p.dtype);
  const bool is_small = z.heads / z.heads_kv * z.seqlen_q <= kDecodeMaxRowsOfLongChunk;
  if (is_small && !p.functions && bytes >= kDecodeMinBytesOfLongChunk) return kDecodeMaxLongChunk;
  return z.seqlen_k >= kDecodeMinKeysOfChunk ? kDecodeMaxChunk : kDecodeMaxQueries;
}

// Returns whether the decode kernel runs: for few queries, or for some more queries of a long cache.
inline bool is_decode(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  const bool fits = z.heads / z.heads_kv * z.seqlen_q <= kMostRowsAtOnce;
  const bool only_softmax_follows = !p.mask && !p.alibi && !p.dropout && p.softcap == 0 &&
                                    p.band.left >= Band::kUnbounded && !p.band.chunks &&
                                    p.varlen.cache.dtype == CacheDType::kOfQuery;
  return is_decode(p, fits && only_softmax_follows ? most_queries_of_chunk(p) : kDecodeMaxQueries);
}
// Returns whether the decode kernel may run for some sequence of the call.
inline bool may_decode(const AttentionParams& call) { return call.varlen || is_decode(call); }

// The splits of the keys of one key head.
struct DecodeSplits {
  int64_t group, rows;  // H / H_kv and group * S_q
  int64_t splits, split_keys;
  Range keys;  // the whole blocks that contain a visible key
};

inline DecodeSplits split_keys_of(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  DecodeSplits key_splits;
  key_splits.group = z.heads / z.heads_kv;
  key_splits.rows = key_splits.group * z.seqlen_q;
  const int64_t block_k = decode_block_k(p);
  key_splits.keys = visible_keys(p.band, 0, z.seqlen_q, z.seqlen_k);
  // One Philox call has random words for two keys.
  key_splits.keys.begin = key_splits.keys.begin / kDecodeKeys * kDecodeKeys;
  const int64_t blocks =
      std::max<int64_t>((key_splits.keys.end - key_splits.keys.begin + block_k - 1) / block_k, 1);
  // The batch size is not used: other sequences in the batch must not change the bits of a result.
  // Each split stores O of all rows.
  const int64_t min_blocks = ceil_div(std::max(kDecodeMinKeys, key_splits.rows * kDecodeKeysPerRow), block_k);
  const int64_t by_shape =
      std::max(std::min(ceil_div(kDecodeTasks, z.heads_kv), ceil_div(blocks, min_blocks)),
               ceil_div(blocks, kDecodeMostKeys / block_k));
  const KeySplits cut = split_keys(p, blocks, by_shape);
  key_splits.splits = cut.splits;
  key_splits.split_keys = cut.tiles_per_split * block_k;
  return key_splits;
}

// Results of all splits of a call: [B][H_kv][splits]. Sequences that are not decoded have no entries.
template <class T>
struct SplitResults {
  SplitResult<T> all;
  const int64_t* first_row;  // [B], only of a packed call
  int64_t heads_kv, d_v;
  int64_t rows = 0;  // of all sequences

  SplitResult<T> of(int64_t b, int64_t h_kv, const DecodeSplits& key_splits) const {
    const int64_t rows = key_splits.splits * key_splits.rows;
    return all.skip((first_row ? first_row[b] : b * heads_kv * rows) + h_kv * rows, d_v);
  }
};

template <class T>
SplitResults<T> allocate_split_results(Arena& arena, const AttentionParams& call) {
  const Sizes& z = call.sizes;
  SplitResults<T> r{{}, nullptr, z.heads_kv, decode_columns<T>(z.head_dim_v)};
  auto add_rows_of = [&](const AttentionParams& p) {
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodeSplits key_splits = split_keys_of(p);
    r.rows += p.sizes.batch * z.heads_kv * key_splits.splits * key_splits.rows;
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

// A task: some splits of some key heads of one sequence.
struct DecodeTask {
  int64_t b;
  HeadRange heads;
  Range splits;
};

// The numbers of key heads and splits in one task. They do not change the bits of a result.
struct DecodeGrouping {
  int64_t heads = 1, splits = 1;
  int64_t rows = 1;            // per key head, maximum over the sequences
  bool leaves_splits = false;  // a sequence has more splits than one task: merge_all_splits() adds them

  int64_t tasks_of_heads(const DecodeSplits& key_splits) const { return ceil_div(key_splits.splits, splits); }
  int64_t count(const AttentionParams& p, const DecodeSplits& key_splits) const {
    return p.sizes.heads_kv / heads * tasks_of_heads(key_splits);
  }
  DecodeTask at(const AttentionParams& p, const DecodeSplits& key_splits, const TaskList::Task& task) const {
    const int64_t per_batch = count(p, key_splits), n = task.index % per_batch;
    const int64_t first = n % tasks_of_heads(key_splits) * splits;
    return {task.b + task.index / per_batch,
            {n / tasks_of_heads(key_splits) * heads, heads},
            {first, std::min(first + splits, key_splits.splits)}};
  }
};

// Returns whether the rows of a key's heads are adjacent in memory.
inline bool has_adjacent_heads(const AttentionParams& p) { return p.k.stride_h < p.k.stride_s; }

// Chooses the largest tasks for which each thread has four tasks, and no task exceeds the average work of a thread.
// With one thread, tasks are as large as possible, because the overhead of a small task is as large as its work.
template <class T>
DecodeGrouping group_decode(const AttentionParams& call, int threads) {
  constexpr int64_t kMostRows = 256;
  const Sizes& z = call.sizes;
  double work = 0, heaviest = 1;  // work of one head; work of its heaviest split
  int64_t splits = 1;
  DecodeGrouping g;
  auto add = [&](const AttentionParams& p) {
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodeSplits key_splits = split_keys_of(p);
    work += static_cast<double>(p.sizes.batch * key_splits.rows) *
            static_cast<double>(key_splits.splits * key_splits.split_keys);
    heaviest =
        std::max(heaviest, static_cast<double>(key_splits.rows) * static_cast<double>(key_splits.split_keys));
    g.rows = std::max(g.rows, key_splits.rows);
    splits = std::max(splits, key_splits.splits);
  };
  if (call.varlen)
    for (int64_t b = 0; b < z.batch; ++b) add(of_sequence(call, b));
  else
    add(call);
  const double share = work * static_cast<double>(z.heads_kv) / (threads == 1 ? 1.0 : 4.0 * threads);
  const int64_t most = std::max<int64_t>(static_cast<int64_t>(share / heaviest), 1);
  // Heads of few keys share a task, to save overhead. Heads of many keys share a task if their rows are adjacent.
  if (splits == 1 || has_adjacent_heads(call)) {
    g.heads = std::min({most, z.heads_kv, std::max<int64_t>(kMostRows / g.rows, 1)});
    // The products of many rows take longer than reading memory, and several heads at once need more of L2.
    constexpr int64_t kMostBytes = 2048;
    const int64_t row = z.head_dim * bytes_of(call.dtype);
    if (g.rows > kMostValueRows) g.heads = std::min(g.heads, std::max<int64_t>(kMostBytes / row, 1));
    while (z.heads_kv % g.heads != 0) --g.heads;
  }
  // One small sequence: a thread merges the splits of its own heads, which are in the cache of its core, if all threads have
  // equal work. Pairs of calls with adjacent heads and 1.5 to 8 MiB: 0.91 to 0.95 of the time; other layouts 0.99 to 1.02.
  const int64_t small_bytes = has_adjacent_heads(call) ? 8 << 20 : 1 << 20;
  const int64_t bytes = z.heads_kv * z.seqlen_k * (z.head_dim + z.head_dim_v) * bytes_of(call.dtype);
  const bool has_whole_heads = z.batch == 1 && bytes <= small_bytes && z.heads_kv / g.heads % threads == 0;
  g.splits =
      has_whole_heads ? splits : ceil_div(splits, ceil_div(splits, std::max<int64_t>(most / g.heads, 1)));
  g.leaves_splits = splits > g.splits;
  return g;
}

// Returns whether the terms e^(S - unified) of a row are as precise as e^(S - m). There is no overflow, even in a sum
// of 2^31 terms, and no loss by underflow. Returns true for NaN, because the result is NaN in both cases.
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
      if constexpr (DecodeBytes<In>::kExists && !kHasOnlyPanels)
        if (s.bytes.q && multiplies_bytes<T>(p, rows)) s.bytes.load_query(p, n * rows + row, q);
      if constexpr (DecodeNibbles::kExists<In> && !kHasOnlyPanels)
        if (s.nibbles.q && multiplies_nibbles<In, T>(p, rows)) s.nibbles.load_query(p, n * rows + row, q);
      if constexpr (DecodeFloat8::kExists<T>)
        if (DecodeFloat8::multiplies(p, rows)) s.float8.load_query(n, row, rows, q, s.products.scale);
    }
    s.products.finish_queries(p, n, rows);
    if constexpr (kUsesIntegerLanes<In>)
      if (multiplies_integer_lanes(p, rows))
        s.integer_lanes.load_queries(n, rows, s.products.q + n * rows * s.products.ldq, s.products.ldq,
                                     s.products.scale);
  }
}

// Computes one split of the task's key heads, and stores its results.
template <class In, class T>
void decode_split(const AttentionParams& p, const DecodeSplits& key_splits, const DecodeScratch<In, T>& s,
                  const DecodeTask& task, const SplitResults<T>& results, int64_t split) {
  const Sizes& z = p.sizes;
  const int64_t b = task.b;
  const HeadRange heads = task.heads;
  const int64_t rows = key_splits.rows, d_v = decode_columns<T>(z.head_dim_v);
  const DecodeTiles tiles = DecodeTiles::of(p);
  const auto end_of = [&](int64_t n) {
    return std::min(key_splits.keys.begin + (n + 1) * key_splits.split_keys, key_splits.keys.end);
  };
  const int64_t begin = key_splits.keys.begin + split * key_splits.split_keys, end = end_of(split);
  const auto result_of = [&](int64_t n) {
    return results.of(b, heads.first + n, key_splits).skip(split * rows, d_v);
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
      const int64_t end_of_split = j0 < end ? end : end_of(std::min(split + 1, task.splits.end - 1));
      return std::min(tiles.keys_from(j0), end_of_split - j0);
    };
    const auto tile_at = [&](int64_t j0) { return tile_sources<In>(p, b, j0, keys_from(j0)); };
    TileSources now = tile_at(begin);
    const int64_t element = p.varlen.cache.dtype == CacheDType::kOfQuery ? sizeof(In) : 1;
    // The first panel of a product reads the whole tile. With this distance 48 and 64 rows of float32 take 0.93 of the time (AVX2,
    // Zen 3), 16 bits 1.0. Not measured on AVX-512.
    const bool reads_tile =
        FA_VECTOR_BYTES < 64 && std::is_same_v<In, T> && multiplies_panels<In, T>(p, rows);
    const auto distance = reads_tile ? PrefetchDistance{tiles.most, true}
                                     : PrefetchDistance::of(now.keys, some, tiles.most, rows, element);
    if (s.prefetches && split == task.splits.begin && keys_from(begin) < end - begin && distance.is_tile &&
        !now.values.is_part_of(now.keys))
      Prefetcher({}, now.values, some, distance)
          .finish();  // values of later tiles are prefetched one tile ahead
    for (int64_t j0 = begin, keys; j0 < end; j0 += keys) {
      keys = keys_from(j0);
      const TileSources next = tile_at(j0 + keys);
      const DecodeTile<In, T> tile{p, s, b, some, first, j0, keys, unified, key_splits.group};
      if (!tile.is_hidden())
        decode_tile<In, T>(tile, now, next, distance, [&](int64_t n) { return result_of(first + n); });
      now = next;
    }
  };
  if (!p.decode.has_unified_max) return run(nullptr, 0, heads.count);
  constexpr double kLargest =
      std::numeric_limits<T>::max();  // the largest finite value of T, for finite guesses
  const T unified = static_cast<T>(std::clamp(p.decode.unified_max, -kLargest, kLargest));
  run(&unified, 0, heads.count);
  for (int64_t n = 0; n < heads.count; ++n) {
    const SplitResult<T> r = result_of(n);
    if (!std::all_of(r.row_max, r.row_max + rows, [&](T m) { return unified_max_fits<T>(m, unified); })) {
      run(nullptr, n, n + 1);
      continue;
    }
    // The reference of O and l. A row without visible keys in this split has no maximum. Other splits that
    // are computed again may have a maximum far below the guess.
    for (int64_t row = 0; row < rows; ++row)
      if (r.row_sum[row] != T(0)) r.row_max[row] = unified;
  }
}

// Computes O and lse of one row of a key head: adds its splits in order. In: the type of the operands.
template <class In, class T>
void merge_row(const AttentionParams& p, const DecodeSplits& key_splits, int64_t b, int64_t h_kv, int64_t row,
               const SplitResult<T>& first) {  // the other splits are added to it
  constexpr int L = kLanes<T>;
  const Sizes& z = p.sizes;
  const int64_t rows = key_splits.rows, d_v = decode_columns<T>(z.head_dim_v);
  const int64_t h = h_kv * (z.heads / z.heads_kv) + row / z.seqlen_q, i = row % z.seqlen_q;
  T* lse = static_cast<T*>(p.lse) + p.lse_index(b, h, i);
  if (key_splits.splits == 1 && !p.sink)  // nothing to add
    return finish_row_of<In, T>(p.out, p.dtype, b, h, i, first.out + row * d_v, z.head_dim_v,
                                first.row_max[row], T(1), first.row_sum[row], *lse);
  const RowStart<T> start = start_of_row<T>(p.sink, b, h);
  T highest = start.max;
  for (int64_t n = 0; n < key_splits.splits; ++n) highest = std::max(highest, first.row_max[n * rows + row]);
  const T reference = highest == kNegInf<T> ? T(0) : highest;
  T* out = first.out + row * d_v;
  T sum = start.sum * std::exp(start.max - reference);
  for (int64_t n = 0; n < key_splits.splits; ++n) {
    const T factor = std::exp(first.row_max[n * rows + row] - reference);
    sum += first.row_sum[n * rows + row] * factor;
    for (int64_t c = 0; c < d_v; c += L) {
      const Vec<T> part = load<T>(out + n * rows * d_v + c) * factor;
      store<T>(out + c, n == 0 ? part : load<T>(out + c) + part);
    }
  }
  finish_row_of<In, T>(p.out, p.dtype, b, h, i, out, z.head_dim_v, highest, T(1), sum, *lse);
}

template <class In, class T>
void decode_task(const AttentionParams& p, const DecodeSplits& key_splits, const DecodeScratch<In, T>& s,
                 const DecodeTask& task, const SplitResults<T>& results) {
#if defined(FA_FEW_ROWS)
  if (!multiplies_panels<In, T>(p, key_splits.rows))
    return FA_FEW_ROWS->decode_task(p, &key_splits, &s, &task, &results);
#endif
  // Heads with rows in several places are computed one after another, so that memory is read in order. Reading a chunk of each
  // head in turn took twice the time. One chunk of keys has no turns.
  const bool reads_in_order = has_adjacent_heads(p) || p.sizes.seqlen_k <= kChunkRows;
  const int64_t together = reads_in_order ? task.heads.count : 1;
  for (int64_t n = 0; n < task.heads.count; n += together) {
    const DecodeTask some{task.b, {task.heads.first + n, together}, task.splits};
    load_decode_queries<In, T>(p, s, some, key_splits.rows);
    for (int64_t split = task.splits.begin; split < task.splits.end; ++split)
      decode_split<In, T>(p, key_splits, s, some, results, split);
  }
  if (task.splits.end - task.splits.begin < key_splits.splits)
    return;  // merge_all_splits() merges these splits
  for (int64_t h = task.heads.first; h < task.heads.first + task.heads.count; ++h)
    for (int64_t row = 0; row < key_splits.rows; ++row)
      merge_row<In, T>(p, key_splits, task.b, h, row, results.of(task.b, h, key_splits));
}

// Merges the results of decode_task(), row by row.
template <class In, class T>
void merge_all_splits(const AttentionParams& call, const DecodeGrouping& tasks,
                      const SplitResults<T>& results, const Parallel& parallel) {
  constexpr int64_t kFew = 32768;  // elements that one thread adds faster than other threads start
  const int64_t heads_kv = call.sizes.heads_kv;
  const Parallel threads{results.rows * results.d_v < kFew ? 1 : parallel.threads, parallel.run};
  for_each_task(threads, call.sizes.batch * heads_kv * tasks.rows, [&](int64_t n, int) {
    const int64_t row = n % tasks.rows, head = n / tasks.rows, h_kv = head % heads_kv, b = head / heads_kv;
    const AttentionParams p = of_sequence(call, b);
    if (p.sizes.seqlen_q == 0 || !is_decode(p)) return;
    const DecodeSplits key_splits = split_keys_of(p);
    if (key_splits.splits <= tasks.splits || row >= key_splits.rows)
      return;  // already merged, or the row does not exist
    merge_row<In, T>(p, key_splits, b, h_kv, row, results.of(b, h_kv, key_splits));
  });
}
