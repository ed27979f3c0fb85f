// The loss that trains the indexer, KL(t_i || softmax_j score[i][j]), without an S_q x S_k array. For query i, with
//
//   T_j = sum_h exp(main_scale <query[i][h], key[j]> - lse[i][h])     the main attention, summed over the heads
//   t_j = T_j / mass, mass = sum_j T_j                                the target
//   L   = log sum_j exp(score[j])                                     index_lse
//
// the loss is (sum_j T_j log T_j - sum_j T_j score[j]) / mass - log(mass) + L. All sums run over the visible keys, or over
// the chosen visible keys. The forward adds them in one sweep over the tiles. The backward recomputes the tiles:
// dscore[j] = dloss (exp(score[j] - L) - t_j). No gradient flows to the target. If mass = 0 the loss is 0.
#pragma once

#include "../vec/math-inl.h"
#include "indexer_chosen-inl.h"

constexpr int64_t kLossBlockQ = 16;  // the lanes of a tile of the main attention

// Returns log(x) for normal x > 0. NaN and Inf are unchanged. A subnormal x may give any finite value. x = 2^n m, m in
// [sqrt(1/2), sqrt(2)), and log(m) = 2 atanh(z) with z = (m - 1) / (m + 1), |z| < 0.172. The first omitted term is
// below 1e-9 (float) and 1e-17 (double).
template <class T>
FA_INLINE Vec<T> log_of_normal(Vec<T> x) {
  using C = Exp2<T>;
  using Index = VecIndex<T>;
  constexpr int kTerms = sizeof(T) == 4 ? 5 : 11;
  const VecBits<T> sqrt_half = (VecBits<T>)splat<T>(T(0.70710678118654752440));
  const Index exponent = (Index)((VecBits<T>)x - sqrt_half) >> C::kMantissaBits;
  const Vec<T> m = (Vec<T>)((VecBits<T>)x - ((VecBits<T>)exponent << C::kMantissaBits));
  const Vec<T> z = (m - T(1)) / (m + T(1)), square = z * z;
  Vec<T> series = splat<T>(T(2) / (2 * kTerms - 1));
#pragma GCC unroll 16
  for (int n = kTerms - 2; n >= 0; --n) series = series * square + T(2) / (2 * n + 1);
  const Vec<T> log = __builtin_convertvector(exponent, Vec<T>) * T(kLn2) + z * series;
  return x - x == T(0) ? log : x;
}

// T of the tiles of a block of queries: all queries see the same keys.
template <class T>
struct MainTile {
  int64_t d;
  T* q_transposed;  // [H][D][kLossBlockQ]
  T* lse;           // [H][kLossBlockQ]; +inf for a row without keys
  T* k_tile;        // [kIndexerBlockK][d]
  T* s;             // [kIndexerBlockK][kLossBlockQ]
  T* sum;           // [kIndexerBlockK][kLossBlockQ]
  T* target;        // [kLossBlockQ][kIndexerBlockK]

  static MainTile allocate(Arena& arena, const IndexerLossParams& p) {
    MainTile m;
    m.d = round_up_to_lanes<T>(p.main_head_dim);
    m.q_transposed = arena.take<T>(p.main_heads * p.main_head_dim * kLossBlockQ);
    m.lse = arena.take<T>(p.main_heads * kLossBlockQ);
    m.k_tile = arena.take<T>(kIndexerBlockK * m.d);
    m.s = arena.take<T>(kIndexerBlockK * kLossBlockQ);
    m.sum = arena.take<T>(kIndexerBlockK * kLossBlockQ);
    m.target = arena.take<T>(kIndexerBlockK * kLossBlockQ);
    return m;
  }

  void load_queries(const IndexerLossParams& p, int64_t b, int64_t i0, int64_t queries) const {
    for (int64_t h = 0; h < p.main_heads; ++h) {
      for_row_type<T>(p.dtype, [&](auto element) {
        using In = decltype(element);
        load_tile_transposed<In, T>(p.query.row<In>(b, h, i0), p.query.stride_s, queries, p.main_head_dim,
                                    q_transposed + h * p.main_head_dim * kLossBlockQ, kLossBlockQ);
      });
      const T* from = static_cast<const T*>(p.lse) + (b * p.main_heads + h) * p.seqlen_q + i0;
      T* to = lse + h * kLossBlockQ;
      std::fill(to, to + kLossBlockQ, -kNegInf<T>);
      for (int64_t n = 0; n < queries; ++n) to[n] = from[n] == kNegInf<T> ? -kNegInf<T> : from[n];
    }
  }

  void compute(const IndexerLossParams& p, int64_t b, int64_t j0, int64_t keys) const {
    std::fill(sum, sum + kIndexerBlockK * kLossBlockQ, T(0));
    const int64_t group = p.main_heads / p.main_heads_kv;
    Tile<T> k{};
    for (int64_t h = 0; h < p.main_heads; ++h) {
      if (h % group == 0)
        k = for_row_type<T>(p.dtype, [&](auto element) {
          using In = decltype(element);
          return load_tile<In, T>(p.key.row<In>(b, h / group, j0), p.key.stride_s, keys, p.main_head_dim,
                                  k_tile);
        });
      gemm<T>(keys, kLossBlockQ,
              {p.main_head_dim, k.data, k.ld, 1, q_transposed + h * p.main_head_dim * kLossBlockQ,
               kLossBlockQ, s, kLossBlockQ, false, static_cast<T>(p.main_scale)});
      for (int64_t r = 0; r < keys; ++r)
        for (int64_t c = 0; c < kLossBlockQ; c += kLanes<T>) {
          const Vec<T> score = load<T>(s + r * kLossBlockQ + c) - load<T>(lse + h * kLossBlockQ + c);
          T* to = sum + r * kLossBlockQ + c;
          store<T>(to, load<T>(to) + exp<T>(score));
        }
    }
    load_tile_transposed<T, T>(sum, kLossBlockQ, kIndexerBlockK, kLossBlockQ, target, kIndexerBlockK);
  }
};

// T of gathered keys of one query. The heads of a group are the columns of a product.
template <class T>
struct MainRow {
  int64_t d, ld, group;
  T* q_transposed;  // [H_kv][D][ld]
  T* lse;           // [H_kv][ld]
  T* k_tile;        // [kIndexerBlockK][d]
  T* s;             // [kIndexerBlockK][ld]
  T* target;        // [kIndexerBlockK]

  static MainRow allocate(Arena& arena, const IndexerLossParams& p) {
    MainRow m;
    m.group = p.main_heads / p.main_heads_kv;
    m.d = round_up_to_lanes<T>(p.main_head_dim);
    m.ld = round_up_to_lanes<T>(m.group);
    m.q_transposed = arena.take<T>(p.main_heads_kv * p.main_head_dim * m.ld);
    m.lse = arena.take<T>(p.main_heads_kv * m.ld);
    m.k_tile = arena.take<T>(kIndexerBlockK * m.d);
    m.s = arena.take<T>(kIndexerBlockK * m.ld);
    m.target = arena.take<T>(kIndexerBlockK);
    return m;
  }

  void load_query(const IndexerLossParams& p, int64_t b, int64_t i) const {
    std::fill(lse, lse + p.main_heads_kv * ld, -kNegInf<T>);
    for_row_type<T>(p.dtype, [&](auto element) {
      using In = decltype(element);
      for (int64_t h_kv = 0; h_kv < p.main_heads_kv; ++h_kv)
        load_tile_transposed<In, T>(p.query.row<In>(b, h_kv * group, i), p.query.stride_h, group,
                                    p.main_head_dim, q_transposed + h_kv * p.main_head_dim * ld, ld);
    });
    for (int64_t h = 0; h < p.main_heads; ++h) {
      const T own = static_cast<const T*>(p.lse)[(b * p.main_heads + h) * p.seqlen_q + i];
      lse[h / group * ld + h % group] = own == kNegInf<T> ? -kNegInf<T> : own;
    }
  }

  void compute(const IndexerLossParams& p, int64_t b, const GatheredKeys& keys) const {
    std::fill(target, target + kIndexerBlockK, T(0));
    for (int64_t h_kv = 0; h_kv < p.main_heads_kv; ++h_kv) {
      for_row_type<T>(p.dtype, [&](auto element) {
        using In = decltype(element);
        for (int64_t r = 0; r < keys.count; ++r) {
          const Tile<T> row = load_tile<In, T>(p.key.row<In>(b, h_kv, keys.key[r]), p.key.stride_s, 1,
                                               p.main_head_dim, k_tile + r * d);
          if (row.data != k_tile + r * d) std::copy(row.data, row.data + d, k_tile + r * d);
        }
      });
      gemm<T>(keys.count, ld,
              {p.main_head_dim, k_tile, d, 1, q_transposed + h_kv * p.main_head_dim * ld, ld, s, ld, false,
               static_cast<T>(p.main_scale)});
      for (int64_t r = 0; r < keys.count; ++r) {
        Vec<T> sum = {};
        for (int64_t c = 0; c < ld; c += kLanes<T>) {
          const Vec<T> prob = exp<T>(load<T>(s + r * ld + c) - load<T>(lse + h_kv * ld + c));
          sum += c + kLanes<T> > group ? without_padding<T>(prob, c, group) : prob;
        }
        target[r] += sum_lanes<T>(sum);
      }
    }
  }
};

// The sums of one query's loss.
template <class T>
struct LossSums {
  T row_max = kNegInf<T>, sum = 0;        // of exp(score - row_max)
  T mass = 0, entropy = 0, weighted = 0;  // of T, T log T, T score

  // Adds `keys` scores and targets, padded to whole vectors with -inf and 0.
  void add(const T* scores, const T* targets, int64_t keys) {
    constexpr int L = kLanes<T>;
    Vec<T> highest = splat<T>(row_max);
    Vec<T> m = {}, e = {}, w = {}, s = {};
    for (int64_t c = 0; c < keys; c += L) {
      const Vec<T> score = load<T>(scores + c), t = load<T>(targets + c);
      highest = max<T>(highest, score);
      m += t;
      const VecIndex<T> is_zero = t == T(0);
      const Vec<T> log = t < std::numeric_limits<T>::min() ? Vec<T>{} : log_of_normal<T>(t);
      e += is_zero ? Vec<T>{} : t * log;
      w += is_zero ? Vec<T>{} : t * score;
    }
    const T new_max = max_lanes<T>(highest);
    const T reference = new_max == kNegInf<T> ? T(0) : new_max;
    for (int64_t c = 0; c < keys; c += L) s += exp<T>(load<T>(scores + c) - reference);
    sum = sum * exp<T>(splat<T>(row_max - reference))[0] + sum_lanes<T>(s);
    row_max = new_max;
    mass += sum_lanes<T>(m);
    entropy += sum_lanes<T>(e);
    weighted += sum_lanes<T>(w);
  }

  void store_to(const IndexerLossParams& p, int64_t b, int64_t i) const {
    const int64_t row = b * p.seqlen_q + i;
    const T lse = sum == T(0) ? kNegInf<T> : row_max + std::log(sum);
    static_cast<T*>(p.index_lse)[row] = lse;
    static_cast<T*>(p.mass)[row] = mass;
    static_cast<T*>(p.loss)[row] = mass == T(0) ? T(0) : (entropy - weighted) / mass - std::log(mass) + lse;
  }
};

// Replaces scores by dscores. Hidden keys have score -inf and target 0.
template <class T>
void score_gradients(const T* scores, const T* targets, int64_t keys, T dloss, T lse, T mass, T* dscores) {
  const T inverse = T(1) / mass;
  for (int64_t c = 0; c < keys; c += kLanes<T>)
    store<T>(dscores + c, dloss * (exp<T>(load<T>(scores + c) - lse) - load<T>(targets + c) * inverse));
}

template <class T>
struct IndexerLossScratch {
  IndexerScoresBackwardScratch<T> index;
  MainTile<T> main;
  MainRow<T> main_row;
  QueryGradients<T> sums[kLossBlockQ];
  T* targets;  // [kIndexerBlockK], of one query

  static IndexerLossScratch allocate(Arena& arena, const IndexerLossParams& p) {
    IndexerLossScratch s;
    s.index = IndexerScoresBackwardScratch<T>::allocate(arena, p);
    s.targets = arena.take<T>(kIndexerBlockK + kLanes<T>);
    if (p.chosen) {
      s.main_row = MainRow<T>::allocate(arena, p);
    } else {
      s.main = MainTile<T>::allocate(arena, p);
      for (auto& sums : s.sums) sums = QueryGradients<T>::allocate(arena, p);
    }
    return s;
  }
};

// Pads the scores and the targets of `keys` keys to whole vectors.
template <class T>
void pad_row(T* scores, T* targets, int64_t keys) {
  for (int64_t r = keys; r < round_up_to_lanes<T>(keys); ++r) {
    scores[r] = kNegInf<T>;
    targets[r] = T(0);
  }
}

// Calls body(n, first, keys) for each query n of a block and each tile, with the visible part of the tile: rows [first,
// first + keys). Before the call, s.index.tile.scores and s.targets hold the scores and targets of query n.
template <class T, class Wanted, class Body>
void for_each_row_of_tiles(const IndexerLossParams& p, IndexerLossScratch<T>& s, int64_t b, int64_t i0,
                           int64_t queries, const Wanted& wanted, const Body& body) {
  const Range block = indexer_keys(p, b, i0, i0 + queries);
  s.main.load_queries(p, b, i0, queries);
  for (int64_t j0 = block.begin; j0 < block.end; j0 += kIndexerBlockK) {
    const int64_t keys = std::min(kIndexerBlockK, block.end - j0);
    s.main.compute(p, b, j0, keys);
    const IndexerTile<T>& tile = s.index.tile;
    for_row_type<T>(p.dtype, [&](auto element) {
      for (int64_t r = 0; r < keys; ++r) {
        // A masked key may be NaN, and its dscore of 0 is a factor of its row.
        if (p.key_is_visible(b, j0 + r))
          tile.template load_key<decltype(element)>(p, b, j0 + r, r);
        else
          std::fill(tile.k_tile + r * tile.d, tile.k_tile + (r + 1) * tile.d, T(0));
      }
    });
    for (int64_t n = 0; n < queries; ++n) {
      const Range own = indexer_keys(p, b, i0 + n, i0 + n + 1);
      const int64_t begin = std::max(own.begin, j0), end = std::min(own.end, j0 + keys);
      if (begin >= end || !wanted(n)) continue;
      s.index.tile.load_query(p, b, i0 + n);
      s.index.tile.compute_scores(p, begin - j0, end - begin);
      std::copy(s.main.target + n * kIndexerBlockK + begin - j0,
                s.main.target + n * kIndexerBlockK + end - j0, s.targets);
      for (int64_t j = begin; j < end; ++j)
        if (!p.key_is_visible(b, j)) {
          s.index.tile.scores[j - begin] = kNegInf<T>;
          s.targets[j - begin] = T(0);
        }
      pad_row<T>(s.index.tile.scores, s.targets, end - begin);
      body(n, j0, begin - j0, end - begin);
    }
  }
}

// The same for the chosen keys of one query: body(keys).
template <class T, class Body>
void for_each_gathered(const IndexerLossParams& p, IndexerLossScratch<T>& s, int64_t b, int64_t i,
                       const Body& body) {
  s.index.tile.load_query(p, b, i);
  s.main_row.load_query(p, b, i);
  for (int64_t first = 0; first < p.chosen.topk; first += kIndexerBlockK) {
    const GatheredKeys keys = GatheredKeys::of(p, p.chosen, b, i, first);
    if (keys.count == 0) continue;
    load_gathered_keys<T>(p, s.index.tile, keys);
    s.index.tile.compute_scores(p, 0, keys.count);
    s.main_row.compute(p, b, keys);
    std::copy(s.main_row.target, s.main_row.target + keys.count, s.targets);
    pad_row<T>(s.index.tile.scores, s.targets, keys.count);
    body(keys);
  }
}

template <class T>
ThreadScratch allocate_indexer_loss(Arena& arena, const IndexerLossParams& p, int threads) {
  return ThreadScratch::allocate(arena, threads,
                                 [&](Arena& one) { IndexerLossScratch<T>::allocate(one, p); });
}

template <class T>
size_t indexer_loss_workspace(const IndexerLossParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexer_loss<T>(arena, p, threads);
  return arena.used();
}

template <class T>
void indexer_loss(const IndexerLossParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const ThreadScratch scratch = allocate_indexer_loss<T>(arena, p, parallel.threads);
  const int64_t blocks = ceil_div(p.seqlen_q, kLossBlockQ);
  for_each_task(parallel, p.batch * blocks, [&](int64_t task, int thread) {
    Arena own = scratch.of_thread(thread);
    auto s = IndexerLossScratch<T>::allocate(own, p);
    const int64_t b = task / blocks, i0 = (blocks - 1 - task % blocks) * kLossBlockQ;
    const int64_t queries = std::min(kLossBlockQ, p.seqlen_q - i0);
    LossSums<T> sums[kLossBlockQ];
    if (p.chosen) {
      for (int64_t n = 0; n < queries; ++n)
        for_each_gathered<T>(p, s, b, i0 + n, [&](const GatheredKeys& keys) {
          sums[n].add(s.index.tile.scores, s.targets, keys.count);
        });
    } else {
      for_each_row_of_tiles<T>(
          p, s, b, i0, queries, [](int64_t) { return true; },
          [&](int64_t n, int64_t, int64_t, int64_t keys) {
            sums[n].add(s.index.tile.scores, s.targets, keys);
          });
    }
    for (int64_t n = 0; n < queries; ++n) sums[n].store_to(p, b, i0 + n);
  });
}

template <class T>
IndexerBackwardWorkspace<T> allocate_indexer_loss_backward(Arena& arena, const IndexerLossParams& p,
                                                           int threads) {
  const ThreadScratch scratch = allocate_indexer_loss<T>(arena, p, threads);
  return {scratch, KeyGradientParts<T>::allocate(arena, p)};
}

template <class T>
size_t indexer_loss_backward_workspace(const IndexerLossBackwardParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexer_loss_backward<T>(arena, p, threads);
  return arena.used();
}

template <class T>
void indexer_loss_backward(const IndexerLossBackwardParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const auto w = allocate_indexer_loss_backward<T>(arena, p, parallel.threads);
  const KeyGradientParts<T>& dk = w.dk;
  for_each_query_of_parts<T>(
      p, dk, kLossBlockQ, parallel, [&](int64_t b, int64_t i0, int64_t queries, int64_t part, int thread) {
        Arena own = w.scratch.of_thread(thread);
        auto s = IndexerLossScratch<T>::allocate(own, p);
        const auto row_of = [&](const void* rows, int64_t n) {
          return static_cast<const T*>(rows)[b * p.seqlen_q + i0 + n];
        };
        const auto is_wanted = [&](int64_t n) { return row_of(p.mass, n) != 0 && row_of(p.dloss, n) != 0; };
        const auto set_gradients = [&](int64_t n, int64_t keys) {
          score_gradients<T>(s.index.tile.scores, s.targets, keys, row_of(p.dloss, n), row_of(p.index_lse, n),
                             row_of(p.mass, n), s.index.dscores);
        };
        if (p.chosen) {
          for (int64_t n = 0; n < queries; ++n) {
            s.index.sums.clear(p);
            if (is_wanted(n))
              for_each_gathered<T>(p, s, b, i0 + n, [&](const GatheredKeys& keys) {
                set_gradients(n, keys.count);
                add_gathered_gradients<T>(p, s.index, keys, dk, part);
              });
            s.index.sums.store_to(p, p.gradients, b, i0 + n);
          }
          return;
        }
        for (int64_t n = 0; n < queries; ++n) s.sums[n].clear(p);
        for_each_row_of_tiles<T>(p, s, b, i0, queries, is_wanted,
                                 [&](int64_t n, int64_t j0, int64_t first, int64_t keys) {
                                   set_gradients(n, keys);
                                   add_indexer_gradients<T>(p, s.index.tile, first, keys, s.index.dscores,
                                                            s.sums[n], dk.row(p, b, part, j0 + first));
                                 });
        for (int64_t n = 0; n < queries; ++n) s.sums[n].store_to(p, p.gradients, b, i0 + n);
      });
  dk.store_to(p, p.gradients, parallel);
}
