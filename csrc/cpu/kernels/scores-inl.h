// From raw products to scores: softcap, ALiBi, mask, band, in that order, on one tile; and dropout's keep
// tile. Scores are in units of log2, so that softmax needs exp2 only: score2 = score * log2(e).

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// Where a tile lies. The forward keeps S^T (rows are keys, lanes are queries: row statistics become per-lane
// vectors); the backward keeps S (rows are queries, lanes are keys: K^T and V^T are packed once per key
// block).
struct TileFrame {
  int64_t b, h;
  int64_t i0, j0;         // first query, first key
  int64_t queries, keys;  // extents inside the tensor
  int64_t ld;             // lanes per row, whole vectors
  bool lanes_are_queries;

  int64_t rows() const { return lanes_are_queries ? keys : queries; }
  int64_t lanes() const { return lanes_are_queries ? queries : keys; }
};

enum class TileMask { kNone, kSome, kAll };  // how many of a tile's elements are masked

// The value a mask element adds to score2; -inf where it masks.
template <class T>
inline T mask_bias(uint8_t attends) {
  return attends ? T(0) : kNegInf<T>;
}
// A finite value stays finite, also finfo.min, which times log2(e) is out of range: a row that holds nothing
// else is not masked, it is uniform.
template <class T, class M>
inline T mask_bias(M value) {
  constexpr T kLargest = std::numeric_limits<T>::max();
  const T bias = scalar_as<T>(value) * T(kLog2E);
  const bool overflowed = std::isinf(bias) && !std::isinf(scalar_as<double>(value));
  return overflowed ? std::copysign(kLargest, bias) : bias;
}

template <class T, class M>
inline TileMask load_mask_as(const MaskParams& mask, const TileFrame& f, T* dst) {
  const M* src = static_cast<const M*>(mask.data) + f.b * mask.stride_b + f.h * mask.stride_h +
                 f.i0 * mask.stride_q + f.j0 * mask.stride_k;
  const int64_t row_stride = f.lanes_are_queries ? mask.stride_k : mask.stride_q;
  const int64_t lane_stride = f.lanes_are_queries ? mask.stride_q : mask.stride_k;
  const int64_t rows = f.rows(), lanes = f.lanes();
  if (lane_stride == 0) {
    for (int64_t r = 0; r < rows; ++r)
      std::fill(dst + r * f.ld, dst + r * f.ld + lanes, mask_bias<T>(src[r * row_stride]));
  } else if (row_stride == 0) {
    for (int64_t c = 0; c < lanes; ++c) dst[c] = mask_bias<T>(src[c * lane_stride]);
    for (int64_t r = 1; r < rows; ++r) std::copy(dst, dst + lanes, dst + r * f.ld);
  } else if (lane_stride == 1) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < lanes; ++c) dst[r * f.ld + c] = mask_bias<T>(src[r * row_stride + c]);
  } else {  // walk the source along its rows, which are contiguous in nearly every mask
    for (int64_t c = 0; c < lanes; ++c)
      for (int64_t r = 0; r < rows; ++r)
        dst[r * f.ld + c] = mask_bias<T>(src[r * row_stride + c * lane_stride]);
  }
  bool any = false, all = true;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < lanes; ++c) {
      const bool masked = dst[r * f.ld + c] == kNegInf<T>;
      any |= masked;
      all &= masked;
    }
  return all ? TileMask::kAll : any ? TileMask::kSome : TileMask::kNone;
}

// Fills dst[row][lane] with the mask's bias. Without a mask it does nothing.
template <class T>
inline TileMask load_mask_tile(const MaskParams& mask, const TileFrame& f, T* dst) {
  if (!mask) return TileMask::kNone;
  switch (mask.dtype) {
    case DType::kBool: return load_mask_as<T, uint8_t>(mask, f, dst);
    case DType::kFloat32: return load_mask_as<T, float>(mask, f, dst);
    case DType::kFloat64: return load_mask_as<T, double>(mask, f, dst);
    case DType::kBFloat16: return load_mask_as<T, BFloat16>(mask, f, dst);
    case DType::kFloat16: return load_mask_as<T, Float16>(mask, f, dst);
  }
  return TileMask::kNone;
}

// The lanes [begin, end) of row r that the band leaves.
inline Range band_lanes(const Band& band, const TileFrame& f, int64_t r) {
  if (f.lanes_are_queries) {
    const Range i = visible_queries(band, f.j0 + r, f.j0 + r + 1, f.i0 + f.queries);
    return {std::max<int64_t>(i.begin - f.i0, 0), i.end - f.i0};
  }
  const Range j = visible_keys(band, f.i0 + r, f.i0 + r + 1, f.j0 + f.keys);
  return {std::max<int64_t>(j.begin - f.j0, 0), j.end - f.j0};
}

// ALiBi's |i + diagonal - j| for the vector of lanes at c of row r.
template <class T>
FA_INLINE Vec<T> alibi_distance(const Band& band, const TileFrame& f, int64_t r, int64_t c) {
  const Vec<T> lane = __builtin_convertvector(iota<T>(), Vec<T>);
  const int64_t at_lane_0 =
      f.lanes_are_queries ? (f.i0 + c + band.diagonal) - (f.j0 + r) : (f.j0 + c) - (f.i0 + r + band.diagonal);
  const Vec<T> distance = lane + static_cast<T>(at_lane_0);
  return distance < T(0) ? -distance : distance;
}

// What a tile's scores were made of, kept for the passes that need to know which elements are masked.
template <class T>
struct ScoreTile {
  TileFrame frame;
  const Band* band;
  const T* mask_tile;  // null without a mask
  bool partial;        // some element is masked

  bool attends(int64_t row, int64_t lane) const {
    const int64_t i = frame.i0 + (frame.lanes_are_queries ? lane : row);
    const int64_t j = frame.j0 + (frame.lanes_are_queries ? row : lane);
    return in_band(*band, i, j) && !(mask_tile && mask_tile[row * frame.ld + lane] == kNegInf<T>);
  }
};

// scores[row][lane], holding scale * log2(e) * <q, k> (softcap: scale / softcap * <q, k>), become score2;
// masked elements and padding lanes become -inf whatever they held, NaN included. `tanh_tile` (or null)
// receives the softcap's tanh, which its derivative 1 - tanh^2 needs.
template <class T>
inline ScoreTile<T> finish_scores(const AttentionParams& p, const TileFrame& f, TileMask masked,
                                  const T* mask_tile, T* scores, T* tanh_tile) {
  constexpr int L = kLanes<T>;
  const bool crossed = !band_covers(p.band, f.i0, f.i0 + f.queries, f.j0, f.j0 + f.keys);
  const VecIndex<T> lane = iota<T>();
  for (int64_t r = 0; r < f.rows(); ++r) {
    T* row = scores + r * f.ld;
    if (p.softcap > 0) {
      const T cap = static_cast<T>(p.softcap * kLog2E);
      for (int64_t c = 0; c < f.ld; c += L) {
        const Vec<T> t = tanh<T>(load<T>(row + c));
        if (tanh_tile) store<T>(tanh_tile + r * f.ld + c, t);
        store<T>(row + c, t * cap);
      }
    }
    if (p.alibi) {
      const T slope = static_cast<const T*>(p.alibi.slopes)[f.b * p.alibi.stride_b + f.h * p.alibi.stride_h];
      const T slope2 = slope * T(kLog2E);
      for (int64_t c = 0; c < f.ld; c += L)
        store<T>(row + c, load<T>(row + c) - slope2 * alibi_distance<T>(p.band, f, r, c));
    }
    if (mask_tile) {
      const T* bias = mask_tile + r * f.ld;
      for (int64_t c = 0; c < f.ld; c += L) {
        const Vec<T> m = load<T>(bias + c);
        store<T>(row + c, m == kNegInf<T> ? m : load<T>(row + c) + m);
      }
    }
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
  return {f, &p.band, mask_tile, crossed || masked != TileMask::kNone};
}

// Fills dst[row][lane] with 1 / (1 - p) where the element is kept and 0 where it is dropped.
template <class T>
inline void load_dropout_tile(const AttentionParams& p, const TileFrame& f, T* dst) {
  const PhiloxKey key = philox_key(p.dropout.rng_state[0], p.dropout.rng_state[1]);
  const int64_t head_index = f.b * p.sizes.heads + f.h;
  const T keep = static_cast<T>(p.dropout.keep_scale);
  const int64_t row_stride = f.lanes_are_queries ? 1 : f.ld, col_stride = f.lanes_are_queries ? f.ld : 1;
  const int64_t i_end = f.i0 + f.queries, j_end = f.j0 + f.keys;
  for (int64_t i = f.i0; i < i_end; i += (i & 7) == 7 ? 9 : 1) {  // i and i + 8 share their calls
    for (int64_t j = f.j0; j < j_end; j += 2) {
      const PhiloxWords words = dropout_words(key, head_index, i, j);
      for (int w = 0; w < 4; ++w) {
        const int64_t row = i + (w >> 1) * 8, col = j + (w & 1);
        if (row < i_end && col < j_end)
          dst[(row - f.i0) * row_stride + (col - f.j0) * col_stride] =
              words.w[w] >= p.dropout.threshold ? keep : T(0);
      }
    }
  }
}
