// What both backward passes share: recompute one tile of P and dS from q, k, v, lse and delta.
//
//   P = 2^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
//
// Rows are queries and lanes are keys; nothing here needs a reduction along a row.

template <class In, class T>
struct BackwardScratch {
  BackwardProducts<In, T> products;
  T* probs;         // [block_q][block_k]  S, then P (after dropout)
  T* dscores;       // [block_q][block_k]  dP, then dS
  T* tanh_tile;     // [block_q][block_k]  only with softcap
  T* mask_tile;     // [block_q][block_k]  only with a mask
  T* dropout_tile;  // [block_q][block_k]  only with dropout
  T* dk;            // [block_k][D]
  T* dv;            // [block_k][D_v]
  T* dmask;         // [block_q][block_k]  only if the mask's gradient is wanted
};

template <class In, class T>
BackwardScratch<In, T> plan_backward(Arena& arena, const BackwardParams& p) {
  const auto [block_q, block_k] = fitted(backward_tiling<T>(), p.sizes);
  BackwardScratch<In, T> s;
  s.products = BackwardProducts<In, T>::plan(arena, p);
  s.probs = arena.take<T>(block_q * block_k);
  s.dscores = arena.take<T>(block_q * block_k);
  s.tanh_tile = p.softcap > 0 ? arena.take<T>(block_q * block_k) : nullptr;
  s.mask_tile = p.mask ? arena.take<T>(block_q * block_k) : nullptr;
  s.dropout_tile = p.dropout ? arena.take<T>(block_q * block_k) : nullptr;
  s.dk = arena.take<T>(block_k * round_up_to_lanes<T>(p.sizes.head_dim));
  s.dv = arena.take<T>(block_k * round_up_to_lanes<T>(p.sizes.head_dim_v));
  const Tiling whole = backward_tiling<T>();
  s.dmask = p.dmask ? arena.take<T>(whole.block_q * whole.block_k) : nullptr;
  return s;
}

// What the backward knows of each query row, in arrays in the form of lse.
template <class T>
struct RowTerms {
  T* delta;  // rowsum(dO o O) - dlse
  T* max;    // P = 2^(score2 - max - log_sum); only where lse_is_exact() is false
  T* log_sum;

  RowTerms of_head(const AttentionParams& p, int64_t b, int64_t h) const {
    const int64_t at = p.statistics_row(b, h, 0);
    return {delta + at, max + at, log_sum + at};
  }
};

// Whether an lse of this size still tells log(l) apart: adding 1e9 to all scores of a row (masks of finfo.min
// or -1e9 do) rounds it away, and 2^(S - lse) is then off by the length of the row. NaN counts as exact: it
// stays NaN.
template <class T>
inline bool lse_is_exact(T lse) {
  return !(std::abs(lse) * std::numeric_limits<T>::epsilon() > T(1e-3)) || std::isinf(lse);
}

template <class T>
struct BackwardTile {
  bool empty;  // every element masked: nothing was computed
  ScoreTile<T> score;
};

// Fills s.probs with the tile's scores in units of log2.
template <class In, class T>
BackwardTile<T> recompute_scores(const BackwardParams& p, BackwardScratch<In, T>& s, const TileFrame& f) {
  const TileMask masked = load_mask_tile<T>(p.mask, f, s.mask_tile);
  if (masked == TileMask::kAll) return {true, {}};
  s.products.scores(p, f, s.probs);
  return {false, finish_scores<T>(p, f, masked, s.mask_tile, s.probs, s.tanh_tile)};
}

// Fills s.probs and s.dscores for the tile at f. `rows` are those of the tile's head.
template <class In, class T>
BackwardTile<T> recompute_tile(const BackwardParams& p, BackwardScratch<In, T>& s, const TileFrame& f,
                               const RowTerms<T>& rows) {
  constexpr int L = kLanes<T>;
  BackwardTile<T> tile = recompute_scores<In, T>(p, s, f);
  if (tile.empty) return tile;

  s.products.dprobs(p, f, s.dscores);
  if (p.dropout) load_dropout_tile<T>(p, f, s.dropout_tile);

  const T* lse = static_cast<const T*>(p.lse) + p.statistics_row(f.b, f.h, 0);
  for (int64_t r = 0; r < f.queries; ++r) {
    const T row_lse = lse[f.i0 + r], row_delta = rows.delta[f.i0 + r];
    const bool exact = lse_is_exact(row_lse);
    // An lse of -inf is a row with everything masked; +inf gives it P = 0 without an Inf - Inf on the way.
    const Vec<T> reference = splat<T>(row_lse == kNegInf<T> ? -kNegInf<T> : row_lse);
    T *prob_row = s.probs + r * f.ld, *dscore_row = s.dscores + r * f.ld;
    for (int64_t c = 0; c < f.ld; c += L) {
      const Vec<T> x = load<T>(prob_row + c);
      const VecIndex<T> hidden = x == kNegInf<T>;  // masked, or padding: 0 whatever dP and lse hold
      // One rounding of the product: an FMA where there is one.
      const Vec<T> exponent =
          exact ? x - reference * T(kLog2E) : (x - rows.max[f.i0 + r]) - rows.log_sum[f.i0 + r];
      const Vec<T> prob = exp2<T>(exponent);
      Vec<T> dropped = prob, dprob = load<T>(dscore_row + c);
      if (p.dropout) {
        const Vec<T> keep = load<T>(s.dropout_tile + r * f.ld + c);
        dropped = prob * keep;
        dprob = dprob * keep;
      }
      store<T>(prob_row + c, hidden ? Vec<T>{} : dropped);
      store<T>(dscore_row + c, hidden ? Vec<T>{} : prob * (dprob - row_delta));
    }
  }
  return tile;
}
