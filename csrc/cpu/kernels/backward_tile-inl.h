// Recomputes one tile of P and dS from q, k, v, lse and delta, for the backward and the double backward.
//
//   P = e^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
//
// If the result is the average of P over the heads: dP = dweights / H and delta = rowsum(P o dP).
//
// Rows are queries and lanes are keys, so no step here reduces along a row.
#pragma once

#include "backward_products-inl.h"
#include "decode-inl.h"
#include "dropout_tile-inl.h"

template <class In, class T>
struct BackwardScratch {
  BackwardProducts<In, T> products;
  T* probs;      // [block_q][block_k]  S, then P (after dropout)
  T* dscores;    // [block_q][block_k]  dP, then dS
  T* tanh_tile;  // [block_q][block_k]  only with softcap
  MaskTile<T> mask;
  T* dropout_tile;  // [block_q][block_k]  only with dropout
  T* dk;            // [block_k][D]
  T* dv;            // [block_k][D_v]
  T* dmask;         // [block_q][block_k]  only if the caller wants the mask's gradient
};

template <class In, class T>
BackwardScratch<In, T> allocate_backward(Arena& arena, const BackwardParams& p) {
  const auto [block_q, block_k] = fitted(backward_tiling<T>(), p.sizes);
  BackwardScratch<In, T> s;
  s.products = BackwardProducts<In, T>::allocate(arena, p);
  s.probs = arena.take<T>(block_q * block_k);
  s.dscores = arena.take<T>(block_q * block_k);
  s.tanh_tile = p.softcap > 0 ? arena.take<T>(block_q * block_k) : nullptr;
  s.mask = allocate_mask_tile<T>(arena, p.mask, block_q, block_k);
  s.mask.functions = allocate_functions<T>(arena, p, block_q, block_k, true);
  s.dropout_tile = p.dropout ? arena.take<T>(block_q * block_k) : nullptr;
  s.dk = arena.take<T>(block_k * round_up_to_lanes<T>(p.sizes.head_dim));
  s.dv = arena.take<T>(block_k * round_up_to_lanes<T>(p.sizes.head_dim_v));
  const Tiling whole = backward_tiling<T>();
  s.dmask = p.dmask ? arena.take<T>(whole.block_q * whole.block_k) : nullptr;
  return s;
}

// Three numbers per query row, in arrays indexed like lse:
//
//   P = e^((S - reference) - correction)    dS = P o (dP - delta)
//
// Normally reference = lse and correction = 0. If lse is too large to be exact: reference = m (the row's maximum),
// correction = log l, and delta = rowsum(P o dP) - dlse. Then all three come from the same recomputed scores, so their
// rounding errors cancel. A row with everything masked has reference = +inf: P = 0 without computing Inf - Inf.
template <class T>
struct RowTerms {
  T *delta, *reference, *correction;

  RowTerms of_head(const AttentionParams& p, int64_t b, int64_t h) const {
    const int64_t at = p.lse_index(b, h, 0);
    return {delta + at, reference + at, correction + at};
  }
};

template <class T>
bool lse_is_below(T lse, T limit) {
  return !(std::abs(lse) > limit) || std::isinf(lse);
}
// For scores with the same bits as in the forward.
template <class T>
bool lse_holds_sum(T lse) {
  return lse_is_below<T>(lse, T(1e-3) / std::numeric_limits<T>::epsilon());
}

// Returns whether an lse of this magnitude contains log l. Adding 1e9 to all scores of a row (masks of finfo.min or
// -1e9) rounds log l away. e^(S - lse) is then wrong by a factor of the row length. Returns true for NaN, which stays
// NaN.
//
// The scores of the forward have the same bits, so their rounding errors cancel in S - lse. Only the decode kernel adds
// products in another order. Then large scores differ by more than P allows.
template <class T>
inline bool lse_is_exact(const BackwardParams& p, T lse) {
  return is_decode(p) ? lse_is_below<T>(lse, T(16)) : lse_holds_sum<T>(lse);
}

// Returns P for a vector of scores, by the forward's exponential. Masked scores give 0 for every lse. In: a type of the
// rows' size. Terms: T if the scores belong to one row, Vec<T> if they belong to a vector of rows.
template <class In, class T, class Terms>
FA_INLINE Vec<T> prob_of(Vec<T> score, Terms reference, Terms correction) {
  return score == kNegInf<T>
             ? Vec<T>{}
             : prob_exp<In, T>((score - reference) - correction, T(kLog2E), Exp2<T>::kLowestProb);
}

// Calls use(frame) for the two halves of the queries of a tile, each with the keys that the band shows to it, if the halves have
// fewer elements, as on the diagonal of a causal mask. Otherwise calls use(tile).
template <class T, class Use>
void for_each_half(const AttentionParams& p, const TileFrame& tile, const Use& use) {
  constexpr int64_t kHalf = backward_tiling<T>().block_q / 2;
  if (p.mask || p.functions || tile.queries <= kHalf) return use(tile);
  const auto half_of = [&](int64_t begin, int64_t end) -> SeenPart {
    const Range seen = visible_keys(p.band, tile.i0 + begin, tile.i0 + end, tile.j0 + tile.keys);
    const Range keys{std::max<int64_t>(seen.begin - tile.j0, 0), seen.end - tile.j0};
    if (keys.begin >= keys.end) return {};
    return {{begin, end}, {SeenPart::in_steps(keys, tile.keys).begin, keys.end}};
  };
  const SeenPart halves[] = {half_of(0, kHalf), half_of(kHalf, tile.queries)};
  if (8 * (halves[0].elements() + halves[1].elements()) > 7 * tile.queries * tile.keys) return use(tile);
  for (const SeenPart& half : halves)
    if (half.elements() > 0) use(half.template frame<T>(tile));
}

// Calls use(score) for each part of a tile that a function's mask shows, with the scores in s.probs.
template <class In, class T, class Use>
void for_each_shown_part(const BackwardParams& p, BackwardScratch<In, T>& s, const TileFrame& whole,
                         const Use& use) {
  const MaskTile<T> mask =
      with_functions<T>(p, whole, load_mask_tile<T>(p.mask, whole, s.mask), s.mask.functions);
  if (mask.masked == TileMask::kAll) return;
  for_each_seen_part(whole, mask, [&](const TileFrame& f, const MaskTile<T>& own) {
    s.products.scores(p, f, s.probs);
    use(finish_scores<T>(p, f, own, s.probs, s.tanh_tile));
  });
}

// The same for the parts that the band and the mask show.
template <class In, class T, class Use>
void for_each_part(const BackwardParams& p, BackwardScratch<In, T>& s, const TileFrame& tile,
                   const Use& use) {
  for_each_half<T>(p, tile, [&](const TileFrame& half) { for_each_shown_part<In, T>(p, s, half, use); });
}

// Fills s.dscores with dP.
template <class In, class T>
void load_dprobs(const BackwardParams& p, BackwardScratch<In, T>& s, const TileFrame& f) {
  if (!p.dweights) return s.products.dprobs(p, f, s.dscores);
  const T share = T(1) / static_cast<T>(p.sizes.heads);
  for_row_type<In>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    for (int64_t r = 0; r < f.queries; ++r) {
      const Row* row = p.dweights.row<Row>(f.b, f.h, f.i0 + r) + f.j0;
      for (int64_t c = 0; c < f.ld; c += kLanes<T>)
        store<T>(s.dscores + r * f.ld + c, share * load_columns<T>(row + c, f.keys - c));
    }
  });
}

// Replaces the scores in s.probs by P, and fills s.dscores with dS. `rows` belong to the tile's head.
template <class In, class T>
void finish_tile(const BackwardParams& p, BackwardScratch<In, T>& s, const TileFrame& f,
                 const RowTerms<T>& rows) {
  constexpr int L = kLanes<T>;

  load_dprobs<In, T>(p, s, f);
  if (p.dropout) load_dropout_tile<T>(p, f, s.dropout_tile);

  for_row_size<In>(p.dtype, [&](auto element) {
    for (int64_t r = 0; r < f.queries; ++r) {
      const int64_t i = f.i0 + r;
      const T delta = rows.delta[i], reference = rows.reference[i], correction = rows.correction[i];
      T *prob_row = s.probs + r * f.ld, *dscore_row = s.dscores + r * f.ld;
      for (int64_t c = 0; c < f.ld; c += L) {
        const Vec<T> x = load<T>(prob_row + c);
        const VecIndex<T> hidden = x == kNegInf<T>;  // masked or padding: dS is 0 for every dP
        const Vec<T> prob = prob_of<decltype(element), T>(x, reference, correction);
        Vec<T> dropped = prob, dprob = load<T>(dscore_row + c);
        if (p.dropout) {
          const Vec<T> keep = load<T>(s.dropout_tile + r * f.ld + c);
          dropped = prob * keep;
          dprob = dprob * keep;
        }
        store<T>(prob_row + c, dropped);
        store<T>(dscore_row + c, hidden ? Vec<T>{} : prob * (dprob - delta));
      }
    }
  });
}
