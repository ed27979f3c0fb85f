// One tile of keys for the rows of some key heads: computes S and P, and adds to m, l and O.
#pragma once

#include "decode_integers-inl.h"
#include "decode_lane_softmax-inl.h"
#include "masked_gemm-inl.h"

template <class T>
inline void multiply_lanes(T* row, const T* factors, int64_t ld) {
  for (int64_t c = 0; c < ld; c += kLanes<T>) store<T>(row + c, load<T>(row + c) * load<T>(factors + c));
}

// The keys [j0, j0 + keys) for some key heads of one sequence. Products loop over chunks of keys, and within a chunk
// over the heads. Rows of neighbouring heads are often adjacent, so memory is read in order.
template <class In, class T>
struct DecodeTile {
  const AttentionParams& p;
  const DecodeScratch<In, T>& s;
  int64_t b;
  HeadRange heads;
  int64_t slot;  // the first head's index among the heads of the task
  int64_t j0, keys;
  const T* unified;  // null: the running maximum
  int64_t group;     // H / H_kv

  const Sizes& z = p.sizes;
  const CacheParams& cache = p.varlen.cache;
  const int64_t rows = group * z.seqlen_q, ld = round_up_to_lanes<T>(keys);
  const int64_t lanes = lanes_of<T>(rows);  // if all rows are multiplied at once
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  const DecodeForm<In, T> form{p, rows, keys};
  // If only the band hides keys, and only the softmax and the factors of 8-bit rows follow the product, scores stay S^T.
  const bool only_band_hides = !p.mask && !p.functions;
  const bool stays_transposed =
      form.all_at_once && !p.dropout && !p.alibi && p.softcap == 0 && (only_band_hides || !may_mask());
  // Whether a key may be hidden from a query.
  bool may_mask() const {
    return p.functions || is_masked_before(p, j0 + keys) ||
           !band_covers(p.band, 0, z.seqlen_q, j0, j0 + keys);
  }
  // Whether the block mask hides the tile from all heads.
  bool is_hidden() const {
    if (!p.functions || !p.functions->blocks) return false;
    for (int64_t h = heads.first * group; h < (heads.first + heads.count) * group; ++h)
      if (states_of_tile(p, {b, h, 0, j0, z.seqlen_q, keys, ld, false}).highest != BlockStates::kHidden)
        return false;
    return true;
  }
  const int64_t padded_keys = whole_chunks(keys);  // of S^T
  T* scores_of(int64_t n) const {
    return s.scores + n * (form.all_at_once ? lanes * padded_keys : rows * ld);
  }
  T* rescale_of(int64_t n) const { return s.products.many.rescale + n * lanes; }
  T* sums_of(int64_t n) const { return s.sums + n * (form.all_at_once ? lanes : rows) * d_v; }

  IntegerProducts<In, T> integers() const { return {*this}; }

  void load_scores(const TileSource& source, Prefetcher ahead) const {
    Prefetcher nothing;
    for (int64_t n = 0; n < heads.count; ++n) s.multiplied[n] = integers().load_key_factors(n);
    const int64_t step = form.key_step(heads.count);
    for (int64_t j = 0, count; j < keys; j += count) {
      count = form.rows_in_place(source, j, step);
      for (int64_t n = 0; n < heads.count; ++n) {
        if (integers().multiplies_few_rows(n, cache.k_scale)) {
          integers().load_scores(n, source, j, count, ahead);
          continue;
        }
        if (integers().multiplies_lanes(n, cache.k_scale)) {
          integers().load_lane_scores(n, source, j, count, key_factor(n), ahead);
          continue;
        }
        const Rows<In> k = tile_rows<In>(p, p.k, cache.k_scale, source, s.multiplied[n], b, heads.first + n,
                                         j0, j, count, z.head_dim, s.key_copy);
        if (form.all_at_once) {
          load_lane_scores(n, j, count, [&](const LaneTile<T>& to, int64_t first) {
            s.products.many.load_scores(slot + n, rows, k, first, count, s.products.scale * key_factor(n), to,
                                        ahead);
          });
          continue;
        }
        T* scores = scores_of(n) + j;
        for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
          s.products.template scores<few.value>((slot + n) * rows + row, k, count, scores + row * ld, ld,
                                                ld - j, row == 0 ? ahead : nothing);
        });
      }
    }
    ahead.finish();
    for (int64_t n = 0; n < heads.count; ++n) {
      if (integers().multiplies_few_rows(n, cache.k_scale)) integers().multiply_units_of_queries(n);
      if (!s.multiplied[n] || form.is_int4 || form.has_key_groups) continue;
      if (!stays_transposed)
        for (int64_t row = 0; row < rows; ++row)
          multiply_lanes<T>(scores_of(n) + row * ld, s.key_factors + n * padded_keys, ld);
      else if (!has_constant_factor(cache.k_scale))
        multiply_keys_of_lanes(n, s.key_factors + n * padded_keys);
    }
  }

  // Replaces S of head `n` by P, and adds to m and l.
  void softmax(int64_t n, const TileSource& values, const SplitResult<T>& r) const {
    const int64_t h_kv = heads.first + n;
    s.multiplied[n] = integers().load_value_factors(n);
    const bool as_integers = integers().multiplies_few_rows(n, cache.v_scale);
    if (stays_transposed) {
      LaneSoftmax<In, T>{*this}.replace_scores(n, r);
      const bool as_bytes = integers().multiplies_lanes(n, cache.v_scale);
      if (s.multiplied[n] && !as_bytes && !pairs_probs(n))
        multiply_keys_of_lanes(n, s.value_factors + n * padded_keys);
      s.added[n] = may_mask() && !as_bytes && !values_are_finite(n, values);
      if (s.added[n]) add_values_not_finite(n, values, r);
      return;
    }
    const bool isolate = may_mask() && (!as_integers || form.is_float8) && !values_are_finite(n, values);
    if (isolate) gather_values(n, values, 0, keys);
    const auto frame_of = [&](int64_t g) {
      return TileFrame{b, h_kv * group + g, 0, j0, z.seqlen_q, keys, ld, false};
    };
    const auto finish_scores_of = [&](int64_t g) {
      const MaskTile<T> mask =
          with_functions<T>(p, frame_of(g), load_mask_tile<T>(p, frame_of(g), s.mask), s.mask.functions);
      return finish_scores<T>(p, frame_of(g), mask, scores_of(n) + g * z.seqlen_q * ld, nullptr);
    };
    // All query heads at once. With isolate one at a time: the mask tile, which says whether a NaN is masked,
    // belongs to one head.
    const int64_t at_once = isolate ? 1 : group;
    for (int64_t g0 = 0; g0 < group; g0 += at_once) {
      const int64_t row = g0 * z.seqlen_q, count = at_once * z.seqlen_q;
      T* scores = scores_of(n) + row * ld;
      const ScoreTile<T> score = finish_scores_of(g0);
      for (int64_t g = g0 + 1; g < g0 + at_once; ++g) finish_scores_of(g);
      decode_softmax_rows<T>(scores, ld, count, unified, r.row_max + row, r.row_sum + row, r.out + row * d_v,
                             d_v);
      if (p.dropout) {  // after the row sum: dropout applies to the normalised P
        for (int64_t g = g0; g < g0 + at_once; ++g) {
          load_dropout_tile<T>(p, frame_of(g), s.dropout_tile);
          multiply_rows<T>(scores_of(n) + g * z.seqlen_q * ld, s.dropout_tile, z.seqlen_q * ld);
        }
      }
      if (s.multiplied[n] && !form.is_int4 && !form.has_value_groups)
        for (int64_t i = 0; i < count; ++i)
          multiply_lanes<T>(scores + i * ld, s.value_factors + n * padded_keys, ld);
      if (isolate)
        add_rows_not_finite<In, T>(score, false, count, scores, ld, 1, gathered(), keys, r.out + row * d_v,
                                   d_v);
    }
    if (as_integers && !isolate)
      integers().finish_probs(n);
    else if (!form.all_at_once)
      s.products.finish_probs(n * rows, rows, s.scores, ld);
    s.added[n] = isolate;
    if (isolate) add_finite_values(n, r);
  }

  // O += P V for the heads that softmax() has not added.
  template <class ResultOf>
  void add_values(const TileSource& source, Prefetcher ahead, const ResultOf& result_of) const {
    if (form.all_at_once) {
      const int64_t step = form.value_step();
      const bool gathers = form.converts_rows() || form.copies_values(source);
      const bool in_one_place = gathers || form.is_in_one_place(source);
      for (int64_t first = 0; first < keys; first += step) {
        const int64_t some = std::min(step, keys - first);
        for (int64_t n = 0; n < heads.count; ++n) {
          if (s.added[n]) continue;
          if (integers().multiplies_lanes(n, cache.v_scale)) {
            integers().add_lane_values(n, source, first, some, result_of(n), ahead);
            continue;
          }
          if (gathers) gather_values(n, source, first, some);
          const auto rows_from = [&](int64_t j) {
            if (gathers) return gathered(j - first);
            In* copy = s.value_copy ? s.value_copy + (j - first) * z.head_dim_v : nullptr;
            return value_rows_of(n, source, j, std::min(kChunkRows, keys - j), copy);
          };
          add_some_values_of(n, first, some, rows_from, in_one_place, result_of(n), ahead);
        }
      }
      for (int64_t n = 0; n < heads.count; ++n)
        if (!s.added[n] && !integers().multiplies_lanes(n, cache.v_scale)) finish_values_of(n, result_of(n));
      return ahead.finish();
    }
    const int64_t step = form.value_step_of_few_rows(heads.count);
    for (int64_t j = 0, count; j < keys; j += count) {
      count = form.rows_in_place(source, j, step);
      for (int64_t n = 0; n < heads.count; ++n) {
        if (s.added[n]) continue;
        if (integers().multiplies_few_rows(n, cache.v_scale))
          integers().add_chunk(n, source, j, count, ahead);
        else
          add_rows_of_values(n, j, count, value_rows_of(n, source, j, count, s.value_copy), ahead);
      }
    }
    ahead.finish();
    for (int64_t n = 0; n < heads.count; ++n) {
      if (s.added[n]) continue;
      if (integers().multiplies_few_rows(n, cache.v_scale))
        integers().add_sums(n, result_of(n).out);
      else
        add_rows<T>(result_of(n).out, sums_of(n), rows * d_v);
    }
  }

  // Calls load(tile, first key), which computes S^T of `count` keys of head `n`, from key j on. Stores S^T or S.
  template <class Load>
  void load_lane_scores(int64_t n, int64_t j, int64_t count, const Load& load) const {
    if (stays_transposed) return load(LaneTile<T>{scores_of(n), padded_keys}, j);
    const LaneTile<T> chunk{s.products.many.scores, whole_chunks(count)};
    load(chunk, 0);
    for_each_lane_tile(chunk, [&](int64_t first, int64_t some, T* block) {
      transpose_lane_scores<T>(block, lanes_of<T>(some), count, some, scores_of(n) + first * ld + j, ld);
    });
  }
  // Calls body(first row, number of rows, S^T of these rows): all rows at once without blocks.
  template <class Body>
  void for_each_lane_tile(const LaneTile<T>& tile, const Body& body) const {
    if (!form.has_blocks) return body(0, rows, tile.data);
    for_each_lane_block<In, T>(
        rows, [&](int64_t first, int64_t count) { body(first, count, tile.at(first, count, 0)); });
  }
  // The tile of one row.
  TileFrame frame_of_row(int64_t n, int64_t row) const {
    return {b, heads.first + n, row % z.seqlen_q, j0, 1, keys, ld, false};
  }
  // Whether one factor of a tile multiplies S^T or O, instead of factors of keys.
  bool has_constant_factor(const CacheScale& scale) const {
    return stays_transposed && is_constant(p, scale);
  }
  T key_factor(int64_t n) const {
    return s.multiplied[n] && has_constant_factor(cache.k_scale) ? s.key_factors[n * padded_keys] : T(1);
  }
  T value_factor(int64_t n) const {
    return s.multiplied[n] && has_constant_factor(cache.v_scale) ? s.value_factors[n * padded_keys] : T(1);
  }
  // Whether softmax() rounds head n's P to pairs in place, times the factor of all values. If each key has a factor, or values may
  // not be finite, P is rounded later.
  bool pairs_probs(int64_t n) const {
    return ManyRowsOperands<In, T>::kPairsProbs && stays_transposed && !may_mask() && form.has_blocks &&
           !integers().multiplies_lanes(n, cache.v_scale) &&
           (!s.multiplied[n] || has_constant_factor(cache.v_scale));
  }

 private:
  void multiply_keys_of_lanes(int64_t n, const T* factors) const {
    for_each_lane_tile({scores_of(n), padded_keys}, [&](int64_t, int64_t count, T* block) {
      multiply_keys<T>(block, keys, count, factors);
    });
  }
  Rows<In> value_rows_of(int64_t n, const TileSource& source, int64_t j, int64_t count, In* copy) const {
    return tile_rows<In>(p, p.v, cache.v_scale, source, s.multiplied[n], b, heads.first + n, j0, j, count,
                         z.head_dim_v, copy);
  }
  bool values_are_finite(int64_t n, const TileSource& source) const {
    for (int64_t j = 0; j < keys; j += kChunkRows)
      if (const int64_t count = std::min(kChunkRows, keys - j);
          !rows_are_finite<In, T>(value_rows_of(n, source, j, count, s.value_copy), count))
        return false;
    return true;
  }
  // The rows that gather_values() copied, from row `n` of them on.
  Rows<In> gathered(int64_t n = 0) const {
    return {s.value_copy + n * z.head_dim_v, z.head_dim_v, z.head_dim_v};
  }
  // Copies or converts `count` values of head `n`, one after another without gaps. The first is key `first` of the tile.
  void gather_values(int64_t n, const TileSource& source, int64_t first, int64_t count) const {
    const int64_t end = first + count;
    for (int64_t j = first, some; j < end; j += some) {
      some = form.rows_in_place(source, j, end - j);
      In* to = s.value_copy + (j - first) * z.head_dim_v;
      const Rows<In> from = value_rows_of(n, source, j, some, to);
      if (from.data != to) copy_rows(from, some, to);
    }
  }

  // O += P V for P^T of a tile in which the band hides keys: values that are not finite reach only the queries that see them.
  void add_values_not_finite(int64_t n, const TileSource& values, const SplitResult<T>& r) const {
    gather_values(n, values, 0, keys);
    add_finite_values(n, r);  // first, because it may multiply O by a factor
    gather_values(n, values, 0, keys);
    for_each_lane_tile({scores_of(n), padded_keys}, [&](int64_t first, int64_t count, T* block) {
      for (int64_t row = first; row < first + count; ++row) {
        add_rows_not_finite<In, T>({frame_of_row(n, row), &p.band, {}, true}, false, 1, block + row - first,
                                   1, lanes_of<T>(count), gathered(), keys, r.out + row * d_v, d_v);
      }
    });
  }
  // O += P V for the finite rows of gathered(). The others become 0 there.
  void add_finite_values(int64_t n, const SplitResult<T>& r) const {
    for (int64_t j = 0; j < keys; ++j)
      if (!rows_are_finite<In, T>({gathered().row(j), 0, z.head_dim_v}, 1))
        std::fill(s.value_copy + j * z.head_dim_v, s.value_copy + (j + 1) * z.head_dim_v, In{});
    Prefetcher nothing;
    const auto rows_from = [&](int64_t j) { return gathered(j); };
    if (form.all_at_once) {
      const int64_t step = form.value_step();
      for (int64_t first = 0; first < keys; first += step)
        add_some_values_of(n, first, std::min(step, keys - first), rows_from, true, r, nothing);
      return finish_values_of(n, r);
    }
    for (int64_t j = 0; j < keys; j += kChunkRows)
      add_rows_of_values(n, j, std::min(kChunkRows, keys - j), rows_from(j), nothing);
    add_rows<T>(r.out, sums_of(n), rows * d_v);
  }

  // Adds the values [first, first + count) of the tile, if all rows are multiplied at once.
  template <class Chunk>
  void add_some_values_of(int64_t n, int64_t first, int64_t count, const Chunk& chunk, bool in_one_place,
                          const SplitResult<T>& r, Prefetcher& ahead) const {
    s.products.many.add_values(
        {scores_of(n), stays_transposed ? lanes : ld, stays_transposed,
         stays_transposed && !form.has_blocks ? rescale_of(n) : nullptr, first, padded_keys, pairs_probs(n),
         sums_of(n)},
        rows, [&](int64_t j) { return chunk(first + j); }, in_one_place, count, r.out, d_v, ahead);
  }

  // The last step of add_some_values_of().
  void finish_values_of(int64_t n, const SplitResult<T>& r) const {
    if (form.has_blocks) ManyRows<In, T>::finish_values(rows, sums_of(n), z.head_dim_v, r.out, d_v);
  }

  // Adds `count` rows of V of one head; the first is key j. Only the first group of rows prefetches.
  void add_rows_of_values(int64_t n, int64_t j, int64_t count, const Rows<In>& v, Prefetcher& ahead) const {
    Prefetcher nothing;
    if (j == 0) std::fill(sums_of(n), sums_of(n) + rows * d_v, T(0));
    for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
      s.products.template add_values<few.value>(n * rows + row, j, s.scores, ld, v, count,
                                                sums_of(n) + row * d_v, d_v, row == 0 ? ahead : nothing);
    });
  }
};

// `next`: the addresses of the next tile. `result_of(n)`: the result that head `n` of `heads` adds to.
template <class In, class T, class ResultOf>
void decode_tile(const DecodeTile<In, T>& tile, const TileSources& now, const TileSources& next,
                 const PrefetchDistance& distance, const ResultOf& result_of) {
  const bool shares_rows = now.values.is_part_of(now.keys);
  // Latent attention: V is the first columns of K, and no row is prefetched twice. The product with V has more and
  // smaller register tiles, so it issues most prefetches of the next tile.
  const int64_t few = kChunkRows, all = kMostDecodeKeys;
  Prefetcher during_scores, during_values;
  if (tile.s.prefetches) {
    during_scores =
        shares_rows ? Prefetcher(next.keys, 0, few, tile.heads)
                    : Prefetcher(now.keys, distance.is_tile ? next.keys : now.values, tile.heads, distance);
    during_values = shares_rows ? Prefetcher(next.keys, few, all, tile.heads)
                                : Prefetcher(now.values, distance.is_tile ? next.values : next.keys,
                                             tile.heads, distance);
  }
  during_scores.divide_lines(tile.form.log2_of_key_lines());
  during_values.divide_lines(tile.form.log2_of_value_lines());
  tile.load_scores(now.keys, during_scores);
  for (int64_t n = 0; n < tile.heads.count; ++n) tile.softmax(n, now.values, result_of(n));
  tile.add_values(now.values, during_values, result_of);
}
