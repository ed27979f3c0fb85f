// The keys with the largest scores of each query, chosen tile by tile: a query holds at most `capacity` keys.
//
// Keys are held in ascending order. If the buffer is full, a radix selection finds the topk-th largest score,
// and keys with smaller scores are removed. Of equal scores the first scores remain. A later key must have a larger
// score. So the choice is unique for all tiles, splits and threads: ties go to the lower index. NaN counts as the
// largest score, as in torch.topk.
#pragma once

#include "indexer_products-inl.h"

// Unsigned integers in the order of the scores.
template <class T>
using OrderBits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <class T>
FA_INLINE OrderBits<T> order_bits(T score) {
  using Bits = OrderBits<T>;
  constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
  const T x = score + T(0);  // -0 becomes 0
  Bits bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const Bits ordered = bits & kSign ? ~bits : bits | kSign;
  return x != x ? ~Bits(0) : ordered;
}

template <class T>
FA_INLINE T score_of_bits(OrderBits<T> ordered) {
  using Bits = OrderBits<T>;
  constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
  const Bits bits = ordered & kSign ? ordered & ~kSign : ~ordered;
  T x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;  // ~0 becomes a NaN
}

// Returns the k-th largest of n values, and the number of larger values. Radix selection, 11 bits at a time; `scratch`
// has n elements.
template <class Bits>
struct KthLargest {
  Bits value;
  int64_t larger;

  static KthLargest find(const Bits* values, int64_t n, int64_t k, Bits* scratch) {
    constexpr int kDigit = 11, kWidth = 8 * sizeof(Bits);
    int32_t histogram[1 << kDigit];
    int64_t larger = 0;
    for (int top = kWidth; top > 0; top -= kDigit) {
      const int shift = std::max(top - kDigit, 0);
      const Bits mask = (Bits(1) << (top - shift)) - 1;
      std::fill(histogram, histogram + mask + 1, 0);
      for (int64_t n_ = 0; n_ < n; ++n_) ++histogram[(values[n_] >> shift) & mask];
      Bits digit = mask;
      for (; larger + histogram[digit] < k; --digit) larger += histogram[digit];
      int64_t kept = 0;
      for (int64_t n_ = 0; n_ < n; ++n_) {
        const Bits value = values[n_];
        scratch[kept] = value;
        kept += ((value >> shift) & mask) == digit;
      }
      values = scratch;
      n = kept;
      if (n == 1) break;
    }
    return {values[0], larger};
  }
};

template <class T>
struct BestKeys {
  using Bits = OrderBits<T>;
  Bits* bits;
  int32_t* index;
  int64_t count = 0;
  Bits floor = 0;          // a later key must be larger,
  bool has_floor = false;  // once topk keys have scores that are not smaller

  void add(Bits value, int32_t j) {
    bits[count] = value;
    index[count] = j;
    count += !has_floor || value > floor;
  }

  // Removes all but the topk largest.
  void shrink(int64_t topk, Bits* scratch) {
    if (count <= topk) return;
    const KthLargest<Bits> kth = KthLargest<Bits>::find(bits, count, topk, scratch);
    int64_t kept = 0, equal = topk - kth.larger;
    for (int64_t n = 0; n < count; ++n) {
      const Bits value = bits[n];
      const bool is_equal = value == kth.value;
      bits[kept] = value;
      index[kept] = index[n];
      kept += value > kth.value || (is_equal && equal > 0);
      equal -= is_equal;
    }
    count = kept;
    floor = kth.value;
    has_floor = true;
  }
};

// The blocks and splits of a call. The shape alone decides.
struct IndexerSchedule {
  int64_t blocks, splits, topk, capacity;  // topk: at most S_k

  static IndexerSchedule of(const IndexerTopkParams& p) {
    constexpr int64_t kTasks = 32, kKeysPerSplit = 2048;
    constexpr int64_t kLeastRoom = 512;  // a small topk is not selected again after each tile
    const int64_t blocks = ceil_div(p.seqlen_q, kIndexerBlockQ);
    const int64_t wanted = ceil_div(kTasks, p.batch * blocks), most = ceil_div(p.seqlen_k, kKeysPerSplit);
    const int64_t topk = std::min(p.topk, p.seqlen_k);
    return {blocks, std::max<int64_t>(1, std::min(wanted, most)), topk, topk + std::max(topk, kLeastRoom)};
  }

  // The keys of a split, in whole tiles.
  Range keys_of(int64_t split, Range keys) const {
    const int64_t first = keys.begin / kIndexerBlockK, tiles = ceil_div(keys.end, kIndexerBlockK) - first;
    const int64_t each = ceil_div(std::max<int64_t>(tiles, 0), splits) * kIndexerBlockK;
    const int64_t begin = first * kIndexerBlockK + split * each;
    return {std::max(begin, keys.begin), std::min(begin + each, keys.end)};
  }
};

template <class In, class T>
struct IndexerTopkScratch {
  using Bits = OrderBits<T>;
  IndexerProducts<In, T> products;
  T* s;        // [kIndexerBlockK][ld]
  T* scores;   // [kIndexerBlockK]
  T* weights;  // [kIndexerBlockQ][ld]
  Bits* bits;  // [kIndexerBlockQ + 1][capacity]; the last row is scratch of shrink()
  int32_t* index;

  static IndexerTopkScratch allocate(Arena& arena, const IndexerTopkParams& p) {
    const int64_t capacity = IndexerSchedule::of(p).capacity;
    IndexerTopkScratch r;
    r.products = IndexerProducts<In, T>::allocate(arena, p);
    r.s = arena.take<T>(kIndexerBlockK * r.products.ld);
    r.scores = arena.take<T>(kIndexerBlockK + kLanes<T>);
    r.weights = arena.take<T>(kIndexerBlockQ * r.products.ld);
    r.bits = arena.take<Bits>((kIndexerBlockQ + 1) * capacity);
    r.index = arena.take<int32_t>(kIndexerBlockQ * capacity);
    return r;
  }
  BestKeys<T> best_keys(int64_t n, int64_t capacity) const {
    return {bits + n * capacity, index + n * capacity};
  }
};

// The best keys of each split of a row, if there are several splits.
template <class T>
struct KeysOfSplits {
  OrderBits<T>* bits;  // [B][S_q][splits][topk]
  int32_t* index;
  int32_t* count;  // [B][S_q][splits]

  static KeysOfSplits allocate(Arena& arena, const IndexerTopkParams& p, const IndexerSchedule& s) {
    const int64_t lists = s.splits > 1 ? p.batch * p.seqlen_q * s.splits : 0;
    KeysOfSplits r;
    r.bits = arena.take<OrderBits<T>>(lists * s.topk);
    r.index = arena.take<int32_t>(lists * s.topk);
    r.count = arena.take<int32_t>(lists);
    return r;
  }
};

template <class T>
void store_chosen(const IndexerTopkParams& p, int64_t b, int64_t i, const BestKeys<T>& chosen) {
  const int64_t row = (b * p.seqlen_q + i) * p.topk;
  std::copy(chosen.index, chosen.index + chosen.count, p.indices + row);
  std::fill(p.indices + row + chosen.count, p.indices + row + p.topk, -1);
  if (!p.scores) return;
  T* scores = static_cast<T*>(p.scores) + row;
  for (int64_t n = 0; n < chosen.count; ++n) scores[n] = score_of_bits<T>(chosen.bits[n]);
  std::fill(scores + chosen.count, scores + p.topk, kNegInf<T>);
}

// Adds the scores of keys [j0, j0 + keys) to the best keys of a query.
template <class T>
void add_scores(const IndexerTopkParams& p, int64_t b, int64_t j0, int64_t keys, const T* scores,
                BestKeys<T>& to) {
  OrderBits<T> bits[kIndexerBlockK];
  bool any = !to.has_floor;
  for (int64_t r = 0; r < keys; ++r) {
    bits[r] = order_bits<T>(scores[r]);
    any |= bits[r] > to.floor;
  }
  if (!any) return;
  for (int64_t r = 0; r < keys; ++r)
    if (p.key_is_visible(b, j0 + r)) to.add(bits[r], static_cast<int32_t>(j0 + r));
}

// Chooses among the keys of one split for a block of queries.
template <class In, class T>
void choose_keys_of_block(const IndexerTopkParams& p, const IndexerSchedule& schedule, int64_t b, int64_t i0,
                          int64_t split, IndexerTopkScratch<In, T>& s, BestKeys<T>* chosen) {
  const int64_t queries = std::min(kIndexerBlockQ, p.seqlen_q - i0), ld = s.products.ld;
  Range seen[kIndexerBlockQ];
  bool needs_scores[kIndexerBlockQ];
  const Range block = schedule.keys_of(split, indexer_keys(p, b, i0, i0 + queries));
  for (int64_t n = 0; n < queries; ++n) {
    chosen[n] = s.best_keys(n, schedule.capacity);
    const Range own = indexer_keys(p, b, i0 + n, i0 + n + 1);
    seen[n] = {std::max(own.begin, block.begin), std::min(own.end, block.end)};
    // A row of at most topk keys chooses all of them.
    needs_scores[n] = p.scores || own.end - own.begin > schedule.topk;
    if (needs_scores[n]) {
      s.products.load_query(p, b, i0 + n, n);
      load_indexer_weights<T>(p, b, i0 + n, s.weights + n * ld, ld);
      continue;
    }
    for (int64_t j = seen[n].begin; j < seen[n].end; ++j)
      if (p.key_is_visible(b, j)) chosen[n].add(0, static_cast<int32_t>(j));
  }
  if (std::none_of(needs_scores, needs_scores + queries, [](bool x) { return x; })) return;

  for (int64_t j0 = block.begin / kIndexerBlockK * kIndexerBlockK; j0 < block.end; j0 += kIndexerBlockK) {
    const int64_t j_end = std::min(j0 + kIndexerBlockK, block.end);
    const int64_t j_begin = std::max(j0, block.begin);
    s.products.load_keys(p, b, j_begin, j_end - j_begin);
    for (int64_t n = 0; n < queries; ++n) {
      const int64_t begin = std::max(seen[n].begin, j_begin), end = std::min(seen[n].end, j_end);
      if (!needs_scores[n] || begin >= end) continue;
      s.products.multiply(p, n, begin - j_begin, end - begin, s.s);
      weigh_heads<T>(s.s, end - begin, p.heads, ld, s.weights + n * ld, s.scores);
      add_scores<T>(p, b, begin, end - begin, s.scores, chosen[n]);
      if (chosen[n].count + kIndexerBlockK > schedule.capacity)
        chosen[n].shrink(schedule.topk, s.bits + kIndexerBlockQ * schedule.capacity);
    }
  }
  for (int64_t n = 0; n < queries; ++n)
    chosen[n].shrink(schedule.topk, s.bits + kIndexerBlockQ * schedule.capacity);
}

template <class T>
struct IndexerTopkWorkspace {
  KeysOfSplits<T> splits;
  ThreadScratch scratch;
};

template <class In, class T>
IndexerTopkWorkspace<T> allocate_indexer_topk(Arena& arena, const IndexerTopkParams& p, int threads) {
  IndexerTopkWorkspace<T> w;
  w.splits = KeysOfSplits<T>::allocate(arena, p, IndexerSchedule::of(p));
  w.scratch = ThreadScratch::allocate(arena, threads,
                                      [&](Arena& one) { IndexerTopkScratch<In, T>::allocate(one, p); });
  return w;
}

template <class In, class T>
size_t indexer_topk_workspace(const IndexerTopkParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexer_topk<In, T>(arena, p, threads);
  return arena.used();
}

template <class In, class T>
void indexer_topk(const IndexerTopkParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const IndexerTopkWorkspace<T> w = allocate_indexer_topk<In, T>(arena, p, parallel.threads);
  const IndexerSchedule schedule = IndexerSchedule::of(p);
  const auto scratch_of = [&](int thread) {
    Arena own = w.scratch.of_thread(thread);
    return IndexerTopkScratch<In, T>::allocate(own, p);
  };

  // Later queries see more keys in causal calls, so they come first.
  const int64_t tasks = schedule.blocks * schedule.splits;
  for_each_task(parallel, p.batch * tasks, [&](int64_t task, int thread) {
    const int64_t b = task / tasks, split = task % schedule.splits;
    const int64_t i0 = (schedule.blocks - 1 - task % tasks / schedule.splits) * kIndexerBlockQ;
    const ProductUnit<In> unit;
    IndexerTopkScratch<In, T> s = scratch_of(thread);
    BestKeys<T> chosen[kIndexerBlockQ];
    choose_keys_of_block<In, T>(p, schedule, b, i0, split, s, chosen);
    for (int64_t n = 0; n < std::min(kIndexerBlockQ, p.seqlen_q - i0); ++n) {
      if (schedule.splits == 1) {
        store_chosen<T>(p, b, i0 + n, chosen[n]);
        continue;
      }
      const int64_t list = (b * p.seqlen_q + i0 + n) * schedule.splits + split;
      std::copy(chosen[n].bits, chosen[n].bits + chosen[n].count, w.splits.bits + list * schedule.topk);
      std::copy(chosen[n].index, chosen[n].index + chosen[n].count, w.splits.index + list * schedule.topk);
      w.splits.count[list] = static_cast<int32_t>(chosen[n].count);
    }
  });
  if (schedule.splits == 1) return;

  for_each_task(parallel, p.batch * p.seqlen_q, [&](int64_t row, int thread) {
    const IndexerTopkScratch<In, T> s = scratch_of(thread);
    OrderBits<T>* scratch = s.bits + kIndexerBlockQ * schedule.capacity;
    BestKeys<T> chosen = s.best_keys(0, schedule.capacity);
    for (int64_t split = 0; split < schedule.splits; ++split) {
      const int64_t list = row * schedule.splits + split;
      for (int64_t n = 0; n < w.splits.count[list]; ++n) {
        chosen.add(w.splits.bits[list * schedule.topk + n], w.splits.index[list * schedule.topk + n]);
        if (chosen.count == schedule.capacity) chosen.shrink(schedule.topk, scratch);
      }
    }
    chosen.shrink(schedule.topk, scratch);
    store_chosen<T>(p, row / p.seqlen_q, row % p.seqlen_q, chosen);
  });
}
