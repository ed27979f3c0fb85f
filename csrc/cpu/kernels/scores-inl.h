// Converts products to scores on one tile: softcap, ALiBi, the user's function, mask and band, in this order.
#pragma once

#include "../vec/math-inl.h"
#include "functions-inl.h"

// The factor of <q, k> before finish_scores(). It multiplies the product, not an operand. The backward packs its
// operands in another order, but its scores have the same bits as the forward's. So their rounding errors cancel in S -
// lse.
template <class T>
inline T product_scale(const AttentionParams& p) {
  return static_cast<T>(p.softcap > 0 ? p.scale / p.softcap : p.scale);
}

// The unit of the scores in the forward. It is `scale` if scores are plain products: then the scores are not
// multiplied, and the softmax multiplies their differences at no cost. Otherwise it is 1.
template <class T>
inline T score_unit(const AttentionParams& p) {
  const bool only_products =
      p.softcap == 0 && !p.alibi && !(p.functions && p.functions->score) && (!p.mask || p.mask.only_masks());
  const T unit = static_cast<T>(p.scale);
  return only_products && unit > T(0) && unit < std::numeric_limits<T>::max() / T(2) ? unit : T(1);
}

// Returns the lanes [begin, end) of row r inside the band.
inline Range band_lanes(const Band& band, const TileFrame& f, int64_t r) {
  if (f.lanes_are_queries) {
    const Range i = visible_queries(band, f.j0 + r, f.j0 + r + 1, f.i0 + f.queries);
    return {std::max<int64_t>(i.begin - f.i0, 0), i.end - f.i0};
  }
  const Range j = visible_keys(band, f.i0 + r, f.i0 + r + 1, f.j0 + f.keys);
  return {std::max<int64_t>(j.begin - f.j0, 0), j.end - f.j0};
}

// Returns ALiBi's |i + diagonal - j| for the vector of lanes at column c of row r.
template <class T>
FA_INLINE Vec<T> alibi_distance(const Band& band, const TileFrame& f, int64_t r, int64_t c) {
  const Vec<T> lane = __builtin_convertvector(iota<T>(), Vec<T>);
  const int64_t at_lane_0 =
      f.lanes_are_queries ? (f.i0 + c + band.diagonal) - (f.j0 + r) : (f.j0 + c) - (f.i0 + r + band.diagonal);
  const Vec<T> distance = lane + static_cast<T>(at_lane_0);
  return distance < T(0) ? -distance : distance;
}

// The masks of a tile, for code that must know which elements are masked.
template <class T>
struct ScoreTile {
  TileFrame frame;
  const Band* band;
  MaskTile<T> mask;
  bool partial;  // some element is masked

  bool attends(int64_t row, int64_t lane) const {
    const int64_t i = frame.i0 + (frame.lanes_are_queries ? lane : row);
    const int64_t j = frame.j0 + (frame.lanes_are_queries ? row : lane);
    return in_band(*band, i, j) && !mask.hides(frame, row, lane);
  }
};

// Input: scores[row][lane] = product_scale() * <q, k>. Output: scores. Masked elements and padding lanes become -inf,
// even if they are NaN. `tanh_tile` (or null) receives the softcap's tanh, for its derivative 1 - tanh^2.
template <class T>
inline ScoreTile<T> finish_scores(const AttentionParams& p, const TileFrame& f, const MaskTile<T>& mask,
                                  T* scores, T* tanh_tile) {
  constexpr int L = kLanes<T>;
  const bool crossed = !band_covers(p.band, f.i0, f.i0 + f.queries, f.j0, f.j0 + f.keys);
  ScoreTile<T> tile{f, &p.band, mask, crossed || mask.masked != TileMask::kNone};
  for (int64_t r = 0; (p.softcap > 0 || p.alibi) && r < f.rows(); ++r) {
    T* row = scores + r * f.ld;
    if (p.softcap > 0) {
      const T cap = static_cast<T>(p.softcap);
      for (int64_t c = 0; c < f.ld; c += L) {
        const Vec<T> t = tanh<T>(load<T>(row + c));
        if (tanh_tile) store<T>(tanh_tile + r * f.ld + c, t);
        store<T>(row + c, t * cap);
      }
    }
    if (p.alibi) {
      const T slope = static_cast<const T*>(p.alibi.slopes)[f.b * p.alibi.stride_b + f.h * p.alibi.stride_h];
      for (int64_t c = 0; c < f.ld; c += L)
        store<T>(row + c, load<T>(row + c) - slope * alibi_distance<T>(p.band, f, r, c));
    }
  }
  if (p.functions && p.functions->score && apply_score_function<T>(p, f, tile.mask, scores))
    tile.partial = true;
  if (mask.in_place && add_in_place<T>(*mask.in_place, f, scores)) tile.partial = true;
  const bool padded = f.lanes() < f.ld;
  if (!crossed && !padded && !mask.bias && !tile.mask.visible) return tile;  // true for most tiles
  const VecIndex<T> lane = iota<T>();
  for (int64_t r = 0; r < f.rows(); ++r) {
    T* row = scores + r * f.ld;
    if (mask.bias) {
      const T* bias = mask.bias + r * f.ld;
      for (int64_t c = 0; c < f.ld; c += L)
        store<T>(row + c, masked_sum<T>(load<T>(row + c), load<T>(bias + c)));
    }
    if (tile.mask.visible) tile.mask.visible.template hide<T>(f, r, row);
    const Range seen = crossed ? band_lanes(p.band, f, r) : Range{0, f.lanes()};
    if (seen.begin > 0 || seen.end < f.ld) {
      for (int64_t c = 0; c < f.ld; c += L) {
        using I = typename VecOf<T>::Index;
        const auto first = static_cast<int>(clamp_to(seen.begin - c, -1, L));
        const auto last = static_cast<int>(clamp_to(seen.end - c, -1, L));
        const I outside = (lane < first) | (lane >= last);
        store<T>(row + c, outside ? splat<T>(kNegInf<T>) : load<T>(row + c));
      }
    }
  }
  return tile;
}
