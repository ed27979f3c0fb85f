// One tile of keys for the rows of some key heads: S, P, and its share of m, l and O.
#pragma once

#include "cache_rows-inl.h"
#include "decode_bytes-inl.h"
#include "dropout_tile-inl.h"
#include "masked_gemm-inl.h"

// A thread's scratch. Rows are those of all heads of a task.
template <class In, class T>
struct DecodeScratch {
  DecodeProducts<In, T> products;
  DecodeBytes<In> bytes;  // only if keys and values are int8
  T* scores;              // [rows][block_k]   S, then P in place
  T* sums;  // [rows][D_v]       a tile's share of O, added to O as a whole: over many tiles that rounds like a sum
            //                   of tiles, not like one chain of all keys
  MaskTile<T> mask;
  T* dropout_tile;  // [S_q][block_k]
  In* key_copy;     // [kChunkRows][D]   only if keys come from pages or 8 bits
  In* value_copy;   // [block_k][D_v]    likewise, or if values that are not finite may be masked
  T* key_factors;   // [heads][block_k]  only if keys are of 8 bits
  T* value_factors;
  bool* multiplied;  // [heads]   the factors multiply scores, and not the keys
  bool* added;       // [heads]   the tile's values are in the sums
};

// For any sequence of the call and tasks of `heads` key heads.
template <class In, class T>
DecodeScratch<In, T> plan_decode_scratch(Arena& arena, const AttentionParams& call, int64_t heads) {
  const Sizes& z = call.sizes;
  const int64_t seqlen_q = is_decode(call, 0) ? z.seqlen_q : std::min(z.seqlen_q, kDecodeMaxQueries);
  const int64_t rows = z.heads / z.heads_kv * seqlen_q;
  const int64_t block_k = fitted(decode_block_k<T>(), z.seqlen_k);
  DecodeScratch<In, T> s;
  s.products = DecodeProducts<In, T>::plan(arena, call, rows, heads, block_k);
  s.bytes = DecodeBytes<In>::plan(arena, call, rows, heads, block_k);
  s.scores = arena.take<T>(heads * rows * block_k);
  s.sums = arena.take<T>(heads * rows * decode_columns<T>(z.head_dim_v));
  // A band may hide keys only if it is bounded.
  const bool may_mask = call.mask || call.band.left < Band::kUnbounded || call.band.right < Band::kUnbounded;
  s.mask = plan_mask_tile<T>(arena, call.mask, seqlen_q, block_k);
  s.dropout_tile = call.dropout ? arena.take<T>(seqlen_q * block_k) : nullptr;
  s.key_copy = copies_rows(call) ? arena.take<In>(kChunkRows * z.head_dim) : nullptr;
  s.value_copy = copies_rows(call) || may_mask ? arena.take<In>(block_k * z.head_dim_v) : nullptr;
  const bool is_8_bit = call.varlen.cache.dtype != CacheDType::kOfQuery;
  s.key_factors = is_8_bit ? arena.take<T>(heads * block_k) : nullptr;
  s.value_factors = is_8_bit ? arena.take<T>(heads * block_k) : nullptr;
  s.multiplied = arena.take<bool>(heads);
  s.added = arena.take<bool>(heads);
  return s;
}

// What one split leaves, or the splits of a key head, one behind the other.
template <class T>
struct SplitResult {
  T* out;      // [rows][D_v]  O, not yet divided by l
  T* row_max;  // [rows]       m
  T* row_sum;  // [rows]       l

  SplitResult skip(int64_t n, int64_t d_v) const { return {out + n * d_v, row_max + n, row_sum + n}; }
};

template <class T>
inline void multiply_row(T* row, T factor, int64_t ld) {
  for (int64_t c = 0; c < ld; c += kLanes<T>) store<T>(row + c, load<T>(row + c) * factor);
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
  if (factor != T(1)) multiply_row<T>(out, factor, d_v);
}

// Rows of a tile, one after the other, or a vector of them at once: their maxima and sums are lanes then.
template <class T>
inline void decode_softmax_rows(T* scores, int64_t ld, int64_t rows, const T* unified, T* row_max, T* row_sum,
                                T* out, int64_t d_v) {
  constexpr int L = kLanes<T>;
  int64_t row = 0;
  for (; row + L <= rows; row += L) {
    T* block = scores + row * ld;
    Vec<T> each[L];
    for (int r = 0; r < L; ++r) {
      each[r] = load<T>(block + r * ld);
      for (int64_t c = L; c < ld; c += L) each[r] = max<T>(each[r], load<T>(block + r * ld + c));
    }
    const Vec<T> old_max = load<T>(row_max + row), new_max = max<T>(old_max, max_each<T>(each));
    const Vec<T> reference = unified ? splat<T>(*unified) : new_max == kNegInf<T> ? Vec<T>{} : new_max;
    const Vec<T> factor = unified ? splat<T>(T(1)) : exp<T>(old_max - reference);
    T references[L], factors[L];
    store<T>(references, reference);
    store<T>(factors, factor);
    for (int r = 0; r < L; ++r) {
      const Vec<T> own = splat<T>(references[r]);
      Vec<T> sum = {};
      for (int64_t c = 0; c < ld; c += L) {
        const Vec<T> prob = exp<T>(load<T>(block + r * ld + c) - own);
        store<T>(block + r * ld + c, prob);
        sum += prob;
      }
      each[r] = sum;
    }
    store<T>(row_sum + row, load<T>(row_sum + row) * factor + sum_each<T>(each));
    store<T>(row_max + row, new_max);
    for (int r = 0; r < L; ++r)
      if (factors[r] != T(1)) multiply_row<T>(out + (row + r) * d_v, factors[r], d_v);
  }
  for (; row < rows; ++row)
    decode_softmax_row<T>(scores + row * ld, ld, unified, row_max[row], row_sum[row], out + row * d_v, d_v);
}

template <class T>
inline void multiply_lanes(T* row, const T* factors, int64_t ld) {
  for (int64_t c = 0; c < ld; c += kLanes<T>) store<T>(row + c, load<T>(row + c) * load<T>(factors + c));
}

// The keys [j0, j0 + keys) for some key heads of one sequence. Products run over chunks of keys, and within one over the
// heads: the rows of all heads often lie side by side in memory, which is then read in its order.
template <class In, class T>
struct DecodeTile {
  const AttentionParams& p;
  const DecodeScratch<In, T>& s;
  int64_t b;
  HeadRange heads;
  int64_t slot;  // of the first head, among those of the task
  int64_t j0, keys;
  const T* unified;  // null: the running maximum

  const Sizes& z = p.sizes;
  const CacheParams& cache = p.varlen.cache;
  const int64_t group = z.heads / z.heads_kv, rows = group * z.seqlen_q, ld = round_up_to_lanes<T>(keys);
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  const bool all_at_once = fills_lanes<T>(rows);
  // int8 rows may be multiplied as they are.
  const bool is_int8 = DecodeBytes<In>::kExists && cache.dtype == CacheDType::kInt8 && !all_at_once;

  T* scores_of(int64_t n) const { return s.scores + n * rows * ld; }
  T* sums_of(int64_t n) const { return s.sums + n * rows * d_v; }

  void load_scores(const TileSource& source, Prefetcher ahead) const {
    Prefetcher nothing;
    for (int64_t n = 0; n < heads.count; ++n)
      s.multiplied[n] =
          load_factors<T>(p, cache.k_scale, heads.first + n, j0, keys, ld, s.key_factors + n * ld);
    for (int64_t j = 0; j < keys; j += kChunkRows) {
      const int64_t count = std::min(kChunkRows, keys - j);
      for (int64_t n = 0; n < heads.count; ++n) {
        T* scores = scores_of(n) + j;
        if (as_bytes(n, cache.k_scale)) {
          load_byte_scores(n, source, j, count, scores, ahead);
          continue;
        }
        const Rows<In> k = tile_rows<In>(p, p.k, cache.k_scale, source, s.multiplied[n], b, heads.first + n,
                                         j0, j, count, z.head_dim, s.key_copy);
        if (all_at_once) {
          ahead.lines(count * lines_of_row(source));
          s.products.all_scores(slot + n, rows, k, count, scores, ld);
          continue;
        }
        for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
          s.products.template scores<few.value>((slot + n) * rows + row, k, count, scores + row * ld, ld,
                                                ld - j, row == 0 ? ahead : nothing);
        });
      }
    }
    ahead.finish();
    for (int64_t n = 0; n < heads.count; ++n)
      for (int64_t row = 0; row < rows; ++row) {
        T* scores = scores_of(n) + row * ld;
        if constexpr (DecodeBytes<In>::kExists)
          if (as_bytes(n, cache.k_scale))
            multiply_row<T>(scores, s.bytes.q_factors[(slot + n) * rows + row], ld);
        if (s.multiplied[n]) multiply_lanes<T>(scores, s.key_factors + n * ld, ld);
      }
  }

  // Of head `n`: P in place of S, and its share of m and l.
  void softmax(int64_t n, const TileSource& values, const SplitResult<T>& r) const {
    const int64_t h_kv = heads.first + n;
    s.multiplied[n] = load_factors<T>(p, cache.v_scale, h_kv, j0, keys, ld, s.value_factors + n * ld);
    const bool may_mask =
        is_masked_before(p, j0 + keys) || !band_covers(p.band, 0, z.seqlen_q, j0, j0 + keys);
    const bool isolate = may_mask && !as_bytes(n, cache.v_scale) && !values_are_finite(n, values);
    const Rows<In> gathered{s.value_copy, z.head_dim_v, z.head_dim_v};
    if (isolate) gather_values(n, values);
    const auto frame_of = [&](int64_t g) {
      return TileFrame{b, h_kv * group + g, 0, j0, z.seqlen_q, keys, ld, false};
    };
    const auto finish_scores_of = [&](int64_t g) {
      const MaskTile<T> mask = load_mask_tile<T>(p, frame_of(g), s.mask);
      return finish_scores<T>(p, frame_of(g), mask, scores_of(n) + g * z.seqlen_q * ld, nullptr);
    };
    // The rows of all heads at once; but the tile of the mask, which tells whether a NaN is masked, is that of one head.
    const int64_t at_once = isolate ? 1 : group;
    for (int64_t g0 = 0; g0 < group; g0 += at_once) {
      const int64_t row = g0 * z.seqlen_q, count = at_once * z.seqlen_q;
      T* scores = scores_of(n) + row * ld;
      const ScoreTile<T> score = finish_scores_of(g0);
      for (int64_t g = g0 + 1; g < g0 + at_once; ++g) finish_scores_of(g);
      decode_softmax_rows<T>(scores, ld, count, unified, r.row_max + row, r.row_sum + row, r.out + row * d_v,
                             d_v);
      if (p.dropout) {  // after the row sum: dropout acts on the normalised P
        for (int64_t g = g0; g < g0 + at_once; ++g) {
          load_dropout_tile<T>(p, frame_of(g), s.dropout_tile);
          multiply_rows<T>(scores_of(n) + g * z.seqlen_q * ld, s.dropout_tile, z.seqlen_q * ld);
        }
      }
      if (s.multiplied[n])
        for (int64_t i = 0; i < count; ++i) multiply_lanes<T>(scores + i * ld, s.value_factors + n * ld, ld);
      if (isolate)
        add_rows_not_finite<In, T>(score, false, count, scores, ld, 1, gathered, keys, r.out + row * d_v,
                                   d_v);
    }
    if constexpr (DecodeBytes<In>::kExists) {
      if (as_bytes(n, cache.v_scale)) s.bytes.finish_probs(n * rows, rows, s.scores, ld);
    }
    if (!as_bytes(n, cache.v_scale)) s.products.finish_probs(n * rows, rows, s.scores, ld);
    s.added[n] = isolate;
    if (!isolate) return;
    for (int64_t j = 0; j < keys; ++j)
      if (!rows_are_finite<In, T>(Rows<In>{gathered.row(j), 0, z.head_dim_v}, 1))
        std::fill(s.value_copy + j * z.head_dim_v, s.value_copy + (j + 1) * z.head_dim_v, In{});
    add_values_of(
        n, [&](int64_t j) { return Rows<In>{gathered.row(j), z.head_dim_v, z.head_dim_v}; }, true, r);
  }

  // O += P V, of those heads that softmax() has not added.
  template <class ResultOf>
  void add_values(const TileSource& source, Prefetcher ahead, const ResultOf& result_of) const {
    const auto rows_of = [&](int64_t n, int64_t j) { return value_rows_of(n, source, j, s.value_copy); };
    if (all_at_once) {
      for (int64_t n = 0; n < heads.count; ++n) {
        ahead.lines(keys * lines_of_row(source));
        if (!s.added[n])
          add_values_of(n, [&](int64_t j) { return rows_of(n, j); }, in_one_place(source), result_of(n));
      }
      return ahead.finish();
    }
    for (int64_t j = 0; j < keys; j += kChunkRows)
      for (int64_t n = 0; n < heads.count; ++n) {
        if (as_bytes(n, cache.v_scale))
          add_byte_chunk(n, source, j, ahead);
        else if (!s.added[n])
          add_chunk(n, j, rows_of(n, j), ahead);
      }
    ahead.finish();
    for (int64_t n = 0; n < heads.count; ++n) {
      if (as_bytes(n, cache.v_scale))
        add_byte_sums(n, result_of(n).out);
      else if (!s.added[n])
        add_rows<T>(result_of(n).out, sums_of(n), rows * d_v);
    }
  }

 private:
  // Whether head n's int8 rows are multiplied as they are, after its factors of `scale` were loaded.
  bool as_bytes(int64_t n, const CacheScale& scale) const { return is_int8 && (!scale || s.multiplied[n]); }

  void load_byte_scores(int64_t n, const TileSource& source, int64_t j, int64_t count, T* scores,
                        Prefetcher& ahead) const {
    if constexpr (DecodeBytes<In>::kExists) {
      Prefetcher nothing;
      const Rows<int8_t> k =
          byte_rows(p, p.k, source, heads.first + n, j0, j, count, z.head_dim, s.bytes.copy);
      for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
        s.bytes.template scores<few.value>((slot + n) * rows + row, k, count, s.products.scale,
                                           scores + row * ld, ld, ld - j, row == 0 ? ahead : nothing);
      });
    }
  }
  // The sums of a tile are whole numbers, in the place of sums_of(n).
  void add_byte_chunk(int64_t n, const TileSource& source, int64_t j, Prefetcher& ahead) const {
    if constexpr (DecodeBytes<In>::kExists) {
      Prefetcher nothing;
      const int64_t count = std::min(kChunkRows, keys - j);
      const Rows<int8_t> v =
          byte_rows(p, p.v, source, heads.first + n, j0, j, count, z.head_dim_v, s.bytes.copy);
      auto* sums = reinterpret_cast<int32_t*>(sums_of(n));
      if (j == 0) std::fill(sums, sums + rows * d_v, 0);
      for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
        s.bytes.template add_values<few.value>(n * rows + row, j, ld, v, count, sums + row * d_v, d_v,
                                               row == 0 ? ahead : nothing);
      });
    }
  }
  void add_byte_sums(int64_t n, T* out) const {
    if constexpr (DecodeBytes<In>::kExists)
      for (int64_t row = 0; row < rows; ++row)
        s.bytes.add_sums(n * rows + row, reinterpret_cast<const int32_t*>(sums_of(n)) + row * d_v,
                         out + row * d_v, d_v);
  }

  static int64_t lines_of_row(const TileSource& source) { return ceil_div(source.bytes, int64_t{64}); }
  bool in_one_place(const TileSource& source) const {
    return source.in_one_place() && cache.dtype == CacheDType::kOfQuery;
  }

  Rows<In> value_rows_of(int64_t n, const TileSource& source, int64_t j, In* copy) const {
    return tile_rows<In>(p, p.v, cache.v_scale, source, s.multiplied[n], b, heads.first + n, j0, j,
                         std::min(kChunkRows, keys - j), z.head_dim_v, copy);
  }
  bool values_are_finite(int64_t n, const TileSource& source) const {
    for (int64_t j = 0; j < keys; j += kChunkRows)
      if (!rows_are_finite<In, T>(value_rows_of(n, source, j, s.value_copy), std::min(kChunkRows, keys - j)))
        return false;
    return true;
  }
  void gather_values(int64_t n, const TileSource& source) const {
    for (int64_t j = 0; j < keys; j += kChunkRows) {
      In* to = s.value_copy + j * z.head_dim_v;
      const Rows<In> from = value_rows_of(n, source, j, to);
      if (from.data == to) continue;
      for (int64_t row = 0; row < std::min(kChunkRows, keys - j); ++row)
        std::copy(from.row(row), from.row(row) + z.head_dim_v, to + row * z.head_dim_v);
    }
  }

  // The whole tile for one head. `chunk(j)`: its rows from key j on.
  template <class Chunk>
  void add_values_of(int64_t n, const Chunk& chunk, bool in_one_place, const SplitResult<T>& r) const {
    if (all_at_once)
      return s.products.add_all_values(n * rows, rows, s.scores, ld, chunk, in_one_place, keys, r.out, d_v);
    Prefetcher nothing;
    for (int64_t j = 0; j < keys; j += kChunkRows) add_chunk(n, j, chunk(j), nothing);
    add_rows<T>(r.out, sums_of(n), rows * d_v);
  }

  // One chunk for one head. The first few rows ask for what comes later.
  void add_chunk(int64_t n, int64_t j, const Rows<In>& v, Prefetcher& ahead) const {
    Prefetcher nothing;
    if (j == 0) std::fill(sums_of(n), sums_of(n) + rows * d_v, T(0));
    for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
      s.products.template add_values<few.value>(n * rows + row, j, s.scores, ld, v,
                                                std::min(kChunkRows, keys - j), sums_of(n) + row * d_v, d_v,
                                                row == 0 ? ahead : nothing);
    });
  }
};

// `next`: where the keys lie that are read after this tile. `result_of(n)`: what head `n` of `heads` adds to.
template <class In, class T, class ResultOf>
void decode_tile(const DecodeTile<In, T>& tile, const TileSource& source, const TileSource& next,
                 const ResultOf& result_of) {
  const AttentionParams& p = tile.p;
  const TileSource values = tile_source<In>(p, p.v, tile.b, tile.j0, tile.keys, p.sizes.head_dim_v);
  tile.load_scores(source, Prefetcher(source, values, tile.heads));
  for (int64_t n = 0; n < tile.heads.count; ++n) tile.softmax(n, values, result_of(n));
  tile.add_values(values, Prefetcher(values, next, tile.heads), result_of);
}
