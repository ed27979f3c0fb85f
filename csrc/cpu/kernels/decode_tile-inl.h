// One tile of keys for the rows of some key heads: computes S and P, and adds to m, l and O.
#pragma once

#include "decode_form-inl.h"
#include "masked_gemm-inl.h"
#include "softmax-inl.h"

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

  using Operands = ManyRowsOperands<In, T>;
  // The type that sets the error of P. float16 counts as float32: calls that widen float16 before have the same bits.
  using ProbType = std::conditional_t<std::is_same_v<In, BFloat16>, In, T>;
  const Sizes& z = p.sizes;
  const CacheParams& cache = p.varlen.cache;
  const int64_t rows = group * z.seqlen_q, ld = round_up_to_lanes<T>(keys);
  const int64_t lanes = lanes_of<T>(rows);  // if all rows are multiplied at once
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  const DecodeForm<In, T> form{p, rows, keys, s.byte_lanes.multiplies(rows),
                               s.byte_lanes.multiplies_values(rows)};
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
  const int64_t padded_keys = ceil_div(keys, kChunkRows) * kChunkRows;  // of S^T
  T* scores_of(int64_t n) const {
    return s.scores + n * (form.all_at_once ? lanes * padded_keys : rows * ld);
  }
  T* rescale_of(int64_t n) const { return s.products.many.rescale + n * lanes; }
  T* sums_of(int64_t n) const { return s.sums + n * rows * d_v; }

  void load_scores(const TileSource& source, Prefetcher ahead) const {
    Prefetcher nothing;
    for (int64_t n = 0; n < heads.count; ++n) {
      s.multiplied[n] =
          load_factors<T>(p, cache.k_scale, heads.first + n, j0, keys, ld, s.key_factors + n * ld);
      if constexpr (DecodeNibbles::kExists<In>)
        if (form.is_int4)
          s.multiplied[n] = s.nibbles.keys_of(slot + n).load(p, cache.k_groups, s.nibbles.of_key,
                                                             heads.first + n, j0, keys);
      if constexpr (kHasByteLanes<In>)
        if (cache.dtype == CacheDType::kInt4 && form.has_byte_lanes)
          s.multiplied[n] =
              load_scales(p, cache.k_groups, heads.first + n, j0, keys, ld, s.key_factors + n * ld);
    }
    const int64_t step = form.key_step(heads.count);
    for (int64_t j = 0, count; j < keys; j += count) {
      count = form.rows_in_place(source, j, step);
      for (int64_t n = 0; n < heads.count; ++n) {
        T* scores = scores_of(n) + j;
        if (as_integers(n, cache.k_scale)) {
          load_integer_scores(n, source, j, count, scores, ahead);
          continue;
        }
        const T scale = s.products.scale * key_factor(n);
        if (multiplies_byte_lanes(n, cache.k_scale)) {
          load_byte_scores(n, source, j, count, key_factor(n), ahead);
          continue;
        }
        const Rows<In> k = tile_rows<In>(p, p.k, cache.k_scale, source, s.multiplied[n], b, heads.first + n,
                                         j0, j, count, z.head_dim, s.key_copy);
        if (form.all_at_once) {
          if (stays_transposed) {
            s.products.many.load_scores(slot + n, rows, k, j, count, scale, {scores_of(n), padded_keys},
                                        ahead);
          } else {
            const LaneTile<T> chunk{s.products.many.scores, ceil_div(count, kChunkRows) * kChunkRows};
            s.products.many.load_scores(slot + n, rows, k, 0, count, scale, chunk, ahead);
            transpose_chunk(chunk, count, scores);
          }
          continue;
        }
        for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
          s.products.template scores<few.value>((slot + n) * rows + row, k, count, scores + row * ld, ld,
                                                ld - j, row == 0 ? ahead : nothing);
        });
      }
    }
    ahead.finish();
    if (stays_transposed) {
      for (int64_t n = 0; n < heads.count; ++n)
        if (s.multiplied[n] && !has_constant_factor(cache.k_scale))
          multiply_keys_of_lanes(n, s.key_factors + n * ld);
      return;
    }
    for (int64_t n = 0; n < heads.count; ++n)
      for (int64_t row = 0; row < rows; ++row) {
        T* scores = scores_of(n) + row * ld;
        if constexpr (DecodeBytes<In>::kExists)
          if (form.is_int8 && as_integers(n, cache.k_scale))
            multiply_row<T>(scores, s.bytes.q_factors[(slot + n) * rows + row], ld);
        if constexpr (DecodeNibbles::kExists<In>)
          if (form.is_int4 && s.multiplied[n])
            multiply_row<T>(scores, s.nibbles.q_units[(slot + n) * rows + row], ld);
        if (s.multiplied[n] && !form.is_int4) multiply_lanes<T>(scores, s.key_factors + n * ld, ld);
      }
  }

  // Replaces S of head `n` by P, and adds to m and l.
  void softmax(int64_t n, const TileSource& values, const SplitResult<T>& r) const {
    const int64_t h_kv = heads.first + n;
    s.multiplied[n] = load_factors<T>(p, cache.v_scale, h_kv, j0, keys, ld, s.value_factors + n * ld);
    if constexpr (DecodeNibbles::kExists<In>)
      if (form.is_int4) s.multiplied[n] = s.nibbles.load_values(p, h_kv, j0, keys);
    if constexpr (kHasByteLanes<In>)
      if (cache.dtype == CacheDType::kInt4 && form.has_byte_values)
        s.multiplied[n] = load_scales(p, cache.v_groups, h_kv, j0, keys, ld, s.value_factors + n * ld);
    if (stays_transposed) {
      softmax_of_lanes(n, r);
      const bool as_bytes = multiplies_byte_lanes(n, cache.v_scale);
      if (s.multiplied[n] && !as_bytes && !pairs_probs(n))
        multiply_keys_of_lanes(n, s.value_factors + n * ld);
      s.added[n] = may_mask() && !as_bytes && !values_are_finite(n, values);
      if (s.added[n]) add_values_not_finite(n, values, r);
      return;
    }
    const bool isolate = may_mask() && !as_integers(n, cache.v_scale) && !values_are_finite(n, values);
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
      if (s.multiplied[n] && !form.is_int4)
        for (int64_t i = 0; i < count; ++i) multiply_lanes<T>(scores + i * ld, s.value_factors + n * ld, ld);
      if (isolate)
        add_rows_not_finite<In, T>(score, false, count, scores, ld, 1, gathered(), keys, r.out + row * d_v,
                                   d_v);
    }
    if constexpr (DecodeBytes<In>::kExists) {
      if (form.is_int8 && as_integers(n, cache.v_scale)) s.bytes.finish_probs(n * rows, rows, s.scores, ld);
    }
    if constexpr (DecodeNibbles::kExists<In>)
      if (form.is_int4 && s.multiplied[n]) s.nibbles.finish_probs(n * rows, rows, s.scores, ld);
    if (!form.all_at_once && !as_integers(n, cache.v_scale))
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
          if (multiplies_byte_lanes(n, cache.v_scale)) {
            add_byte_values(n, source, first, some, result_of(n), ahead);
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
      return ahead.finish();
    }
    const int64_t step = form.value_step_of_few_rows(heads.count);
    for (int64_t j = 0, count; j < keys; j += count) {
      count = form.rows_in_place(source, j, step);
      for (int64_t n = 0; n < heads.count; ++n) {
        if (as_integers(n, cache.v_scale))
          add_integer_chunk(n, source, j, ahead);
        else if (!s.added[n])
          add_rows_of_values(n, j, count, value_rows_of(n, source, j, count, s.value_copy), ahead);
      }
    }
    ahead.finish();
    for (int64_t n = 0; n < heads.count; ++n) {
      if (as_integers(n, cache.v_scale))
        add_integer_sums(n, result_of(n).out);
      else if (!s.added[n])
        add_rows<T>(result_of(n).out, sums_of(n), rows * d_v);
    }
  }

 private:
  // Whether head n's rows of int8 or int4 are multiplied without conversion. The factors or groups must be loaded
  // before.
  bool as_integers(int64_t n, const CacheScale& scale) const {
    return form.is_int8 ? !scale || s.multiplied[n] : form.is_int4 && s.multiplied[n];
  }
  // Whether head n's keys or values are multiplied as bytes, with rows as lanes. The factors must be loaded before.
  bool multiplies_byte_lanes(int64_t n, const CacheScale& scale) const {
    return form.has_byte_lanes && (s.multiplied[n] || (cache.dtype == CacheDType::kInt8 && !scale));
  }
  // Whether one factor of a tile multiplies S^T or O, instead of factors of keys.
  bool has_constant_factor(const CacheScale& scale) const {
    return stays_transposed && is_constant(p, scale);
  }
  T key_factor(int64_t n) const {
    return s.multiplied[n] && has_constant_factor(cache.k_scale) ? s.key_factors[n * ld] : T(1);
  }
  T value_factor(int64_t n) const {
    return s.multiplied[n] && has_constant_factor(cache.v_scale) ? s.value_factors[n * ld] : T(1);
  }
  void load_byte_scores(int64_t n, const TileSource& source, int64_t j, int64_t count, T factor,
                        Prefetcher& ahead) const {
    if constexpr (kHasByteLanes<In>) {
      const Rows<int8_t> k =
          byte_rows(p, p.k, source, heads.first + n, j0, j, count, s.byte_lanes.key_bytes, s.byte_lanes.copy);
      if (stays_transposed)
        return s.byte_lanes.load_scores(slot + n, rows, k, j, count, factor, {scores_of(n), padded_keys},
                                        ahead);
      const LaneTile<T> chunk{s.products.many.scores, ceil_div(count, kChunkRows) * kChunkRows};
      s.byte_lanes.load_scores(slot + n, rows, k, 0, count, factor, chunk, ahead);
      transpose_chunk(chunk, count, scores_of(n) + j);
    }
  }
  // O += P V for int8 or int4 values from key `first` of the tile on.
  void add_byte_values(int64_t n, const TileSource& source, int64_t first, int64_t count,
                       const SplitResult<T>& r, Prefetcher& ahead) const {
    if constexpr (kHasByteLanes<In>) {
      const bool is_each_key = s.multiplied[n] && stays_transposed && !has_constant_factor(cache.v_scale);
      const T* factors = is_each_key ? s.value_factors + n * ld + first : nullptr;
      Rows<int8_t> v[kTileChunks];
      for (int64_t j = 0; j < count; j += kChunkRows)
        v[j / kChunkRows] =
            byte_rows(p, p.v, source, heads.first + n, j0, first + j, std::min(kChunkRows, count - j),
                      s.byte_lanes.value_bytes, s.byte_lanes.copy + j * s.byte_lanes.value_bytes);
      s.byte_lanes.add_values(
          s.products.many,
          {scores_of(n), stays_transposed ? lanes : ld, stays_transposed, nullptr, first, padded_keys},
          value_factor(n), factors, rows, v, count, r.out, d_v, ahead);
    }
  }
  // scores[row][j] = S^T of a chunk.
  void transpose_chunk(const LaneTile<T>& chunk, int64_t count, T* scores) const {
    for_each_lane_tile(chunk, [&](int64_t first, int64_t some, T* block) {
      transpose_lane_scores<T>(block, lanes_of<T>(some), count, some, scores + first * ld, ld);
    });
  }
  // Returns the same rows of int4.
  Rows<uint8_t> nibble_rows(const Tensor4& t, const TileSource& source, int64_t n, int64_t j, int64_t count,
                            int64_t cols) const {
    const Rows<int8_t> rows =
        byte_rows(p, t, source, heads.first + n, j0, j, count, cols / 2, s.nibbles.copy);
    return {reinterpret_cast<const uint8_t*>(rows.data), rows.stride, cols};
  }

  void load_integer_scores(int64_t n, const TileSource& source, int64_t j, int64_t count, T* scores,
                           Prefetcher& ahead) const {
    if constexpr (DecodeNibbles::kExists<In>) {
      if (form.is_int4) {
        Prefetcher nothing;
        const Rows<uint8_t> k = nibble_rows(p.k, source, n, j, count, z.head_dim);
        TileGroups groups = s.nibbles.keys_of(slot + n);
        groups.scales += j * s.nibbles.of_key.count;
        if (groups.products) groups.products += j * s.nibbles.of_key.count;
        return for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
          s.nibbles.template scores<few.value>((slot + n) * rows + row, k, groups, count, s.products.scale,
                                               scores + row * ld, ld, ld - j, row == 0 ? ahead : nothing);
        });
      }
    }
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
  // Sums are int32, in the memory of sums_of(n).
  void add_integer_chunk(int64_t n, const TileSource& source, int64_t j, Prefetcher& ahead) const {
    if constexpr (DecodeNibbles::kExists<In>) {
      if (form.is_int4) {
        Prefetcher nothing;
        const int64_t count = std::min(kChunkRows, keys - j);
        const Rows<uint8_t> v = nibble_rows(p.v, source, n, j, count, z.head_dim_v);
        if (j == 0) s.nibbles.clear_sums(n * rows, rows);
        return for_each_few_rows<T>(rows, [&](int64_t row, auto few) {
          s.nibbles.template add_values<few.value>(n * rows + row, j, v, count, row == 0 ? ahead : nothing);
        });
      }
    }
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
  void add_integer_sums(int64_t n, T* out) const {
    if constexpr (DecodeNibbles::kExists<In>) {
      for (int64_t row = 0; form.is_int4 && row < rows; ++row)
        s.nibbles.add_sums(n * rows + row, out + row * d_v, z.head_dim_v);
      if (form.is_int4) return;
    }
    if constexpr (DecodeBytes<In>::kExists)
      for (int64_t row = 0; row < rows; ++row)
        s.bytes.add_sums(n * rows + row, reinterpret_cast<const int32_t*>(sums_of(n)) + row * d_v,
                         out + row * d_v, d_v);
  }

  // The softmax of S^T. For blocks of lanes it also multiplies O by the factors; otherwise the product P V does.
  void softmax_of_lanes(int64_t n, const SplitResult<T>& r) const {
    const LaneTile<T> tile{scores_of(n), padded_keys};
    if (may_mask()) hide_keys_of_lanes(n, tile);
    if (!form.has_blocks)
      return decode_softmax_lanes<ProbType, T>(
          tile.data, keys, lanes, unified, r.row_max, r.row_sum, rows, rescale_of(n),
          [&](int64_t row) { return ProbsInPlace<T>{tile.data + row, lanes, keys}; });
    for_each_lane_tile(tile, [&](int64_t first, int64_t count, T* block) {
      softmax_of_block(n, block, lanes_of<T>(count), count, r.skip(first, d_v), rescale_of(n));
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
  // S^T = -inf where the band hides the key from the row's query.
  void hide_keys_of_lanes(int64_t n, const LaneTile<T>& tile) const {
    for_each_lane_tile(tile, [&](int64_t first, int64_t count, T* block) {
      const int64_t block_lanes = lanes_of<T>(count);
      for (int64_t r = 0; r < count; ++r) {
        const Range seen = band_lanes(p.band, frame_of_row(n, first + r), 0);
        for (int64_t j = 0; j < seen.begin; ++j) block[j * block_lanes + r] = kNegInf<T>;
        for (int64_t j = std::max<int64_t>(seen.end, 0); j < keys; ++j)
          block[j * block_lanes + r] = kNegInf<T>;
      }
    });
  }
  // Whether softmax() rounds head n's P to pairs in place, times the factor of all values. If each key has a factor, or values may
  // not be finite, P is rounded later.
  bool pairs_probs(int64_t n) const {
    return Operands::kPairsProbs && stays_transposed && !may_mask() && form.has_blocks &&
           !multiplies_byte_lanes(n, cache.v_scale) &&
           (!s.multiplied[n] || has_constant_factor(cache.v_scale));
  }
  void softmax_of_block(int64_t n, T* scores, int64_t block_lanes, int64_t count, const SplitResult<T>& r,
                        T* rescale) const {
    const int64_t vectors = padded_keys * block_lanes / kLanes<T>;
    if constexpr (Operands::kPairsProbs)
      if (pairs_probs(n)) {
        using Pairs = typename Operands::Element;
        Pairs* pairs = reinterpret_cast<Pairs*>(scores);
        softmax_of_block(scores, block_lanes, count, r, rescale,
                         typename Operands::RoundedProbs(pairs, block_lanes, value_factor(n)));
        if (block_lanes == kLanes<T>)
          std::fill(pairs + ceil_div(keys, 2) * block_lanes, pairs + padded_keys / 2 * block_lanes, Pairs{});
        return;
      }
    softmax_of_block(scores, block_lanes, count, r, rescale, ProbsInPlace<T>{scores, kLanes<T>, vectors});
    if (block_lanes == kLanes<T>)  // pads pairs with zeros
      std::fill(scores + keys * block_lanes, scores + padded_keys * block_lanes, T(0));
  }
  template <class Write>
  void softmax_of_block(T* scores, int64_t block_lanes, int64_t count, const SplitResult<T>& r, T* rescale,
                        const Write& write) const {
    if (block_lanes < kLanes<T>)
      return decode_softmax_part_of_vector<ProbType, T>(scores, keys, padded_keys, block_lanes, unified,
                                                        r.row_max, r.row_sum, count, r.out, d_v, write);
    decode_softmax_lanes<ProbType, T>(scores, keys, block_lanes, unified, r.row_max, r.row_sum, count,
                                      rescale, [&](int64_t) { return write; });
    for (int64_t row = 0; row < count; ++row)
      if (rescale[row] != T(1)) multiply_row<T>(r.out + row * d_v, rescale[row], d_v);
  }

  void multiply_keys_of_lanes(int64_t n, const T* factors) const {
    for_each_lane_tile({scores_of(n), padded_keys}, [&](int64_t, int64_t count, T* block) {
      multiply_keys<T>(block, keys, lanes_of<T>(count), factors);
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
      return;
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
         stays_transposed && !form.has_blocks ? rescale_of(n) : nullptr, first, padded_keys, pairs_probs(n)},
        rows, [&](int64_t j) { return chunk(first + j); }, in_one_place, count, r.out, d_v, ahead);
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
