// Forward for few queries against many keys, where reading K and V once is what takes the time:
// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
//
// The query heads that share a key head are rows of one tile, so that their keys and values are read once.
// The keys are cut into `splits`, one task each, that leave (O, m, l); merge_splits() adds them in order. How
// many there are depends on the shape alone, so results do not depend on the number of threads.
//
// With a unified maximum (FlashDecoding++, Hong et al. 2023) every split takes exp2 against one constant in
// place of its running maximum, and is computed again, safely, if a row's maximum turns out to be too far
// from it.

inline bool is_decode(const AttentionParams& p) {
  return p.sizes.seqlen_q <= kDecodeMaxQueries || p.decode.num_splits > 0 || p.decode.has_unified_max;
}

template <class In, class T>
struct DecodeScratch {
  DecodeProducts<In, T> products;
  T* scores;        // [rows][block_k]   S, then P in place
  T* mask_tile;     // [S_q][block_k]
  T* dropout_tile;  // [S_q][block_k]
  In* finite_tile;  // [block_k][D_v]    V without the rows that are not finite
};

template <class T>
struct SplitResult {
  T* out;      // [rows][D_v]  O, not yet divided by l
  T* row_max;  // [rows]       m, in units of log2
  T* row_sum;  // [rows]       l
};

template <class T>
struct DecodeWorkspace {
  int64_t rows, splits, split_keys;  // H / H_kv * S_q; pieces; keys in each
  Range keys;                        // whole blocks of those that some query sees
  T *out, *row_max, *row_sum;        // SplitResult of [B * H_kv][splits]
  int64_t d_v;
  char* scratch;  // one DecodeScratch a thread

  SplitResult<T> result(int64_t kv_head, int64_t split) const {
    const int64_t at = (kv_head * splits + split) * rows;
    return {out + at * d_v, row_max + at, row_sum + at};
  }
};

template <class In, class T>
DecodeScratch<In, T> plan_decode(Arena& arena, const AttentionParams& p) {
  const Sizes& z = p.sizes;
  const int64_t rows = z.heads / z.heads_kv * z.seqlen_q;
  const int64_t block_k = fitted(decode_block_k<T>(), z.seqlen_k);
  DecodeScratch<In, T> s;
  s.products = DecodeProducts<In, T>::plan(arena, p, rows, block_k);
  s.scores = arena.take<T>(rows * block_k);
  // A band may hide keys only if it is bounded.
  const bool may_mask = p.mask || p.band.left < Band::kUnbounded || p.band.right < Band::kUnbounded;
  s.mask_tile = p.mask ? arena.take<T>(z.seqlen_q * block_k) : nullptr;
  s.dropout_tile = p.dropout ? arena.take<T>(z.seqlen_q * block_k) : nullptr;
  s.finite_tile = may_mask ? arena.take<In>(block_k * z.head_dim_v) : nullptr;
  return s;
}

template <class In, class T>
DecodeWorkspace<T> plan_decode_workspace(Arena& arena, const AttentionParams& p, int threads) {
  const Sizes& z = p.sizes;
  const int64_t kv_heads = z.batch * z.heads_kv, block_k = decode_block_k<T>();
  DecodeWorkspace<T> w;
  w.rows = z.heads / z.heads_kv * z.seqlen_q;
  w.keys = visible_keys(p.band, 0, z.seqlen_q, z.seqlen_k);
  w.keys.begin = w.keys.begin / block_k * block_k;  // dropout's words come in pairs of keys
  const int64_t blocks = std::max<int64_t>((w.keys.end - w.keys.begin + block_k - 1) / block_k, 1);
  const int64_t wanted = p.decode.num_splits > 0
                             ? std::min(p.decode.num_splits, blocks)
                             : std::min((kDecodeTasks + kv_heads - 1) / kv_heads,
                                        (blocks + kDecodeMinBlocks - 1) / kDecodeMinBlocks);
  w.split_keys = (blocks + wanted - 1) / wanted * block_k;
  w.splits = (blocks * block_k + w.split_keys - 1) / w.split_keys;
  w.d_v = decode_columns<T>(z.head_dim_v);
  w.out = arena.take<T>(kv_heads * w.splits * w.rows * w.d_v);
  w.row_max = arena.take<T>(kv_heads * w.splits * w.rows);
  w.row_sum = arena.take<T>(kv_heads * w.splits * w.rows);
  Arena scratch(nullptr);
  plan_decode<In, T>(scratch, p);
  w.scratch = arena.take<char>(static_cast<int64_t>(scratch.used()) * threads);
  return w;
}

// One row of a tile: P = 2^(S - m') in place, and its share of m, l and O. `unified` (or null) takes the
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
    const Vec<T> prob = exp2<T>(load<T>(scores + c) - reference);
    store<T>(scores + c, prob);
    sum += prob;
  }
  const T factor = unified ? T(1) : exp2<T>(splat<T>(row_max - reference))[0];
  row_sum = row_sum * factor + sum_lanes<T>(sum);
  row_max = new_max;
  if (factor == T(1)) return;
  for (int64_t c = 0; c < d_v; c += L) store<T>(out + c, load<T>(out + c) * factor);
}

// Whether a row's terms 2^(S - unified) kept the precision of 2^(S - m): no overflow, even of a sum of 2^31
// of them, and no loss to underflow. NaN is in range: it is the right answer then.
template <class T>
inline bool unified_max_fits(T row_max, T unified) {
  const T limit = static_cast<T>(Exp2<T>::kHighest / 2);
  return row_max == kNegInf<T> || !(std::abs(row_max - unified) > limit);
}

// A copy of `rows` rows with zeros for those that are not finite.
template <class In, class T>
Rows<In> finite_rows(const Rows<In>& from, int64_t rows, In* copy) {
  for (int64_t n = 0; n < rows; ++n) {
    In* to = copy + n * from.cols;
    std::copy(from.row(n), from.row(n) + from.cols, to);
    if (!rows_are_finite<In, T>({to, 0, from.cols}, 1)) std::fill(to, to + from.cols, In{});
  }
  return {copy, from.cols, from.cols};
}

template <class In, class T>
void decode_tile(const AttentionParams& p, const DecodeScratch<In, T>& s, int64_t b, int64_t h_kv, int64_t j0,
                 int64_t keys, const T* unified, const SplitResult<T>& r) {
  const Sizes& z = p.sizes;
  const int64_t group = z.heads / z.heads_kv, rows = group * z.seqlen_q, ld = round_up_to_lanes<T>(keys);
  const int64_t d_v = decode_columns<T>(z.head_dim_v);
  const Rows<In> k{p.k.row<In>(b, h_kv, j0), p.k.stride_s, z.head_dim};
  const Rows<In> v{p.v.row<In>(b, h_kv, j0), p.v.stride_s, z.head_dim_v};
  const Rows<In> next_k{k.row(decode_block_k<T>()), k.stride, k.cols}, nothing{nullptr, 0, 0};

  for_each_few_rows<T>(rows, [&](int64_t row, auto count) {
    s.products.template scores<count.value>(row, k, keys, s.scores + row * ld, ld, row == 0 ? v : nothing);
  });

  const bool may_mask = p.mask || !band_covers(p.band, 0, z.seqlen_q, j0, j0 + keys);
  const bool isolate = may_mask && !rows_are_finite<In, T>(v, keys);
  for (int64_t g = 0; g < group; ++g) {
    const TileFrame f{b, h_kv * group + g, 0, j0, z.seqlen_q, keys, ld, false};
    T* scores = s.scores + g * z.seqlen_q * ld;
    const TileMask masked = load_mask_tile<T>(p.mask, f, s.mask_tile);
    const ScoreTile<T> score = finish_scores<T>(p, f, masked, s.mask_tile, scores, nullptr);
    for (int64_t i = 0; i < z.seqlen_q; ++i) {
      const int64_t row = g * z.seqlen_q + i;
      decode_softmax_row<T>(scores + i * ld, ld, unified, r.row_max[row], r.row_sum[row], r.out + row * d_v,
                            d_v);
    }
    if (p.dropout) {  // after the row sum: dropout acts on the normalised P
      load_dropout_tile<T>(p, f, s.dropout_tile);
      multiply_rows<T>(scores, s.dropout_tile, z.seqlen_q * ld);
    }
    if (isolate)
      add_rows_not_finite<In, T>(score, false, z.seqlen_q, scores, ld, 1, v, keys,
                                 r.out + g * z.seqlen_q * d_v, d_v);
  }
  const Rows<In> values = isolate ? finite_rows<In, T>(v, keys, s.finite_tile) : v;
  for_each_few_rows<T>(rows, [&](int64_t row, auto count) {
    s.products.template add_values<count.value>(s.scores + row * ld, ld, values, keys, r.out + row * d_v, d_v,
                                                row == 0 ? next_k : nothing);
  });
}

template <class In, class T>
void decode_split(const AttentionParams& p, const DecodeWorkspace<T>& w, const DecodeScratch<In, T>& s,
                  int64_t kv_head, int64_t split) {
  const Sizes& z = p.sizes;
  const int64_t b = kv_head / z.heads_kv, h_kv = kv_head % z.heads_kv, group = z.heads / z.heads_kv;
  const int64_t block_k = decode_block_k<T>();
  for (int64_t g = 0; g < group; ++g)
    for (int64_t n = 0; n < z.seqlen_q; ++n)
      s.products.load_query(p, g * z.seqlen_q + n, p.q.row<In>(b, h_kv * group + g, n));

  const SplitResult<T> r = w.result(kv_head, split);
  const int64_t begin = w.keys.begin + split * w.split_keys, end = std::min(begin + w.split_keys, w.keys.end);
  auto run = [&](const T* unified) {
    std::fill(r.out, r.out + w.rows * w.d_v, T(0));
    std::fill(r.row_max, r.row_max + w.rows, kNegInf<T>);
    std::fill(r.row_sum, r.row_sum + w.rows, T(0));
    for (int64_t j0 = begin; j0 < end; j0 += block_k)
      decode_tile<In, T>(p, s, b, h_kv, j0, std::min(block_k, end - j0), unified, r);
  };
  if (!p.decode.has_unified_max) return run(nullptr);
  constexpr double kLargest = std::numeric_limits<T>::max();  // of the finite guesses that T holds
  const T unified = static_cast<T>(std::clamp(p.decode.unified_max * kLog2E, -kLargest, kLargest));
  run(&unified);
  for (int64_t row = 0; row < w.rows; ++row)
    if (!unified_max_fits<T>(r.row_max[row], unified)) return run(nullptr);
  // What O and l are relative to. A row that sees no key of this split has no maximum: other splits, computed
  // again, may have one far below the guess.
  for (int64_t row = 0; row < w.rows; ++row)
    if (r.row_sum[row] != T(0)) r.row_max[row] = unified;
}

// O and lse of one key head's queries from its splits, added in order.
template <class In, class T>
void merge_splits(const AttentionParams& p, const DecodeWorkspace<T>& w, int64_t kv_head) {
  constexpr int L = kLanes<T>;
  const Sizes& z = p.sizes;
  const int64_t b = kv_head / z.heads_kv, h_kv = kv_head % z.heads_kv, group = z.heads / z.heads_kv;
  const SplitResult<T> first = w.result(kv_head, 0);  // the others are added to it
  for (int64_t row = 0; row < w.rows; ++row) {
    T highest = kNegInf<T>;
    for (int64_t n = 0; n < w.splits; ++n) highest = std::max(highest, first.row_max[n * w.rows + row]);
    const T reference = highest == kNegInf<T> ? T(0) : highest;
    T* out = first.out + row * w.d_v;
    T sum = 0;
    for (int64_t n = 0; n < w.splits; ++n) {
      const T factor = exp2<T>(splat<T>(first.row_max[n * w.rows + row] - reference))[0];
      sum += first.row_sum[n * w.rows + row] * factor;
      for (int64_t c = 0; c < w.d_v; c += L) {
        const Vec<T> part = load<T>(out + n * w.rows * w.d_v + c) * factor;
        store<T>(out + c, n == 0 ? part : load<T>(out + c) + part);
      }
    }
    const int64_t h = h_kv * group + row / z.seqlen_q, i = row % z.seqlen_q;
    T* lse = static_cast<T*>(p.lse) + (b * z.heads + h) * z.seqlen_q + i;
    finish_row<In, T>(p.out.row<In>(b, h, i), out, z.head_dim_v, highest, sum, *lse);
  }
}

template <class In, class T>
void decode(const AttentionParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const DecodeWorkspace<T> w = plan_decode_workspace<In, T>(arena, p, parallel.threads);
  Arena measure(nullptr);
  plan_decode<In, T>(measure, p);
  const int64_t kv_heads = p.sizes.batch * p.sizes.heads_kv;
  for_each_task(parallel, kv_heads * w.splits, [&](int64_t task, int thread) {
    Arena scratch(w.scratch + thread * measure.used());
    decode_split<In, T>(p, w, plan_decode<In, T>(scratch, p), task / w.splits, task % w.splits);
  });
  for_each_task(parallel, kv_heads, [&](int64_t kv_head, int) { merge_splits<In, T>(p, w, kv_head); });
}
