// What both backward passes share: recompute one tile of P and dS from q, k, v, lse and delta.
//
//   P = 2^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
//
// Rows are queries and lanes are keys; nothing here needs a reduction along a row.

template <class T>
struct BackwardScratch {
  T* k_transposed;  // [D][block_k]     K^T * scale * log2(e)
  T* v_transposed;  // [D_v][block_k]
  T* k_tile;        // [block_k][D]     used only where the caller's memory cannot be read directly; so too:
  T* q_tile;        // [block_q][D]
  T* dout_tile;     // [block_q][D_v]
  T* probs;         // [block_q][block_k]  S, then P (after dropout)
  T* dscores;       // [block_q][block_k]  dP, then dS
  T* tanh_tile;     // [block_q][block_k]  only with softcap
  T* mask_tile;     // [block_q][block_k]  only with a mask
  T* dropout_tile;  // [block_q][block_k]  only with dropout
  T* dk;            // [block_k][D]
  T* dv;            // [block_k][D_v]
  T* dmask;         // [block_q][block_k]  only if the mask's gradient is wanted
  T* finite_tile;   // [max(block_q, block_k)][max(D, D_v)]  for masked_gemm
};

template <class T>
BackwardScratch<T> plan_backward(Arena& arena, const BackwardParams& p) {
  const auto [block_q, block_k] = backward_tiling<T>();
  const int64_t d = round_up_to_lanes<T>(p.sizes.head_dim), d_v = round_up_to_lanes<T>(p.sizes.head_dim_v);
  BackwardScratch<T> s;
  s.k_transposed = arena.take<T>(p.sizes.head_dim * block_k);
  s.v_transposed = arena.take<T>(p.sizes.head_dim_v * block_k);
  s.k_tile = arena.take<T>(block_k * d);
  s.q_tile = arena.take<T>(block_q * d);
  s.dout_tile = arena.take<T>(block_q * d_v);
  s.probs = arena.take<T>(block_q * block_k);
  s.dscores = arena.take<T>(block_q * block_k);
  s.tanh_tile = p.softcap > 0 ? arena.take<T>(block_q * block_k) : nullptr;
  s.mask_tile = p.mask ? arena.take<T>(block_q * block_k) : nullptr;
  s.dropout_tile = p.dropout ? arena.take<T>(block_q * block_k) : nullptr;
  s.dk = arena.take<T>(block_k * d);
  s.dv = arena.take<T>(block_k * d_v);
  s.dmask = p.dmask ? arena.take<T>(block_q * block_k) : nullptr;
  s.finite_tile = arena.take<T>(std::max(block_q, block_k) * std::max(d, d_v));
  return s;
}

// Loads K^T and V^T of the keys [j0, j0 + keys) of one head, zero-padded to whole vectors of keys.
template <class In, class T>
void load_key_block(const BackwardParams& p, const BackwardScratch<T>& s, int64_t b, int64_t h_kv, int64_t j0,
                    int64_t keys) {
  const int64_t ld = round_up_to_lanes<T>(keys);
  load_tile_transposed<In, T>(p.k.row<In>(b, h_kv, j0), p.k.stride_s, keys, p.sizes.head_dim,
                              product_scale<T>(p), s.k_transposed, ld);
  load_tile_transposed<In, T>(p.v.row<In>(b, h_kv, j0), p.v.stride_s, keys, p.sizes.head_dim_v, T(1),
                              s.v_transposed, ld);
}

// What the backward knows of each query row, in arrays over S_q.
template <class T>
struct RowTerms {
  T* delta;  // rowsum(dO o O) - dlse
  T* max;    // P = 2^(score2 - max - log_sum); only where lse_is_exact() is false
  T* log_sum;

  RowTerms of_head(const Sizes& z, int64_t b, int64_t h) const {
    const int64_t at = (b * z.heads + h) * z.seqlen_q;
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
  Tile<T> q, dout;
};

// Fills s.probs with the tile's scores in units of log2.
template <class In, class T>
BackwardTile<T> recompute_scores(const BackwardParams& p, const BackwardScratch<T>& s, const TileFrame& f) {
  const TileMask masked = load_mask_tile<T>(p.mask, f, s.mask_tile);
  if (masked == TileMask::kAll) return {true, {}, {}, {}};
  const Tile<T> q =
      load_tile<In, T>(p.q.row<In>(f.b, f.h, f.i0), p.q.stride_s, f.queries, p.sizes.head_dim, s.q_tile);
  gemm<T>(f.queries, f.ld, {p.sizes.head_dim, q.data, q.ld, 1, s.k_transposed, f.ld, s.probs, f.ld, false});
  return {false, finish_scores<T>(p, f, masked, s.mask_tile, s.probs, s.tanh_tile), q, {}};
}

// Fills s.probs and s.dscores for the tile at f. `rows` are those of the tile's head.
template <class In, class T>
BackwardTile<T> recompute_tile(const BackwardParams& p, const BackwardScratch<T>& s, const TileFrame& f,
                               const RowTerms<T>& rows) {
  constexpr int L = kLanes<T>;
  const Sizes& z = p.sizes;
  BackwardTile<T> tile = recompute_scores<In, T>(p, s, f);
  if (tile.empty) return tile;

  tile.dout =
      load_tile<In, T>(p.dout.row<In>(f.b, f.h, f.i0), p.dout.stride_s, f.queries, z.head_dim_v, s.dout_tile);
  gemm<T>(f.queries, f.ld,
          {z.head_dim_v, tile.dout.data, tile.dout.ld, 1, s.v_transposed, f.ld, s.dscores, f.ld, false});
  if (p.dropout) load_dropout_tile<T>(p, f, s.dropout_tile);

  const T* lse = static_cast<const T*>(p.lse) + (f.b * z.heads + f.h) * z.seqlen_q;
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
