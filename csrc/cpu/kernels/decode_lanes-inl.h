// S^T = K Q^T of decode for a few rows of Q. Rows are lanes. They are cut into blocks of at most one vector
// (decode_blocks-inl.h), and all blocks use a chunk of K while it is in L1.
//
// A vector of L lanes holds kSpan neighbouring columns of each row: lane r * kSpan + i is column i of row r. So few rows
// fill the vector, too. A load broadcasts kSpan columns of a key to all rows. Example: 8 rows, L = 16, kSpan = 2:
//
//   S^T:  q0[c] q0[c+1] q1[c] q1[c+1] ...  times  k[c] k[c+1] k[c] k[c+1] ...
//
// The sums of kSpan keys are then added within their spans, and become one vector of S^T, [keys][lanes], where `lanes`
// is L / kSpan. decode_lane_values-inl.h has the product with V.
#pragma once

#include "decode_blocks-inl.h"
#include "gemm-inl.h"
#include "pairs-inl.h"
#include "prefetcher-inl.h"
#include "softmax-inl.h"

// Returns rows with whole steps of columns: in place, or a copy with zeros after the last column. `copy` has room for them.
template <class In>
inline Rows<In> with_whole_steps(const Rows<In>& k, int64_t keys, int64_t step, In* copy) {
  const int64_t cols = ceil_div(k.cols, step) * step;
  if (k.cols == cols) return k;
  for (int64_t n = 0; n < keys; ++n) {
    std::memcpy(static_cast<void*>(copy + n * cols), k.row(n), k.cols * sizeof(In));
    std::memset(static_cast<void*>(copy + n * cols + k.cols), 0, (cols - k.cols) * sizeof(In));
  }
  return {copy, cols, cols};
}

// Returns the vector, loaded into a register. Otherwise the compiler may load it again for each multiply-add, and the loads are
// the limit.
template <class V>
FA_INLINE V in_register(V x) {
#if defined(__x86_64__) && !defined(FA_EMULATED_AVX512)  // emulated vectors are pairs of registers
  asm("" : "+v"(x));
#endif
  return x;
}

// As multiply_add(), and an integer sum stays in its register. The compiler may add integers in any order: it would keep several
// products, and store other sums in memory.
template <class Sum, class A, class B>
FA_INLINE Sum add_product(Sum sum, A a, B b) {
  sum = multiply_add(sum, a, b);
  if constexpr (std::is_same_v<Sum, VecIndex<float>>) sum = in_register(sum);
  return sum;
}

// sum[n] += a * b[n]. Two multiplications of integers, then two additions: one after the other take 1.03 of the time (Zen 3).
template <int N, bool kTwo = true, class Sum, class A, class B>
FA_INLINE void add_products(Sum* sum, A a, const B* b) {
  if constexpr (kTwo && std::is_same_v<Sum, VecIndex<float>> && N % 2 == 0) {
#pragma GCC unroll 16
    for (int n = 0; n < N; n += 2) {
      const Sum first = in_register(multiply_add(Sum{}, a, b[n])),
                second = in_register(multiply_add(Sum{}, a, b[n + 1]));
      sum[n] = in_register(sum[n] + first);
      sum[n + 1] = in_register(sum[n + 1] + second);
    }
  } else {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[n] = add_product(sum[n], a, b[n]);
  }
}

// Returns kSpan elements from p on, repeated in all spans of a vector.
template <int kSpan, class E>
FA_INLINE auto broadcast_span(const E* p) {
  if constexpr (kSpan == 1) {
    return broadcast_element(p);
  } else {
    using V = decltype(load_elements(p));
    if constexpr (kSpan * sizeof(E) == FA_VECTOR_BYTES) return load_elements(p);
    if constexpr (kSpan * sizeof(E) == 8) {
      uint64_t bits;
      std::memcpy(&bits, p, sizeof(bits));
      return (V)(VecBits<double>{} + bits);
    } else {
#if defined(FA_BROADCAST_16_BYTES)
      return (V)FA_BROADCAST_16_BYTES(p);
#else
      return load_elements(p);  // vectors of 16 bytes
#endif
    }
  }
}

// Adds the lanes of each span. rows[0] to rows[kKeys / kSpan - 1] become S^T, [kKeys][lanes].
template <class T, int kSpan, int kKeys>
FA_INLINE void sum_spans(Vec<T> (&sum)[kKeys]) {
  constexpr int L = kLanes<T>, kPart = 16 / sizeof(T);
  if constexpr (kSpan > 1) {
    const VecIndex<T> even = every_second_part<T, 1, kPart>(0), odd = every_second_part<T, 1, kPart>(1);
    int count = kKeys;
#pragma GCC unroll 4
    for (int span = kSpan; span > 1; span /= 2) {
      count /= 2;
#pragma GCC unroll 16
      for (int n = 0; n < kKeys / 2; ++n)
        if (n < count)
          sum[n] = pick<T>(sum[2 * n], sum[2 * n + 1], even) + pick<T>(sum[2 * n], sum[2 * n + 1], odd);
    }
    // Now each 16 bytes hold kSpan keys of kRows rows. Brings the rows of a key together.
    constexpr int kRows = kPart / kSpan;
    VecIndex<T> from;
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      const int key = i / (L / kSpan), row = i % (L / kSpan);
      from[i] = row / kRows * kPart + key * kRows + row % kRows;
    }
#pragma GCC unroll 16
    for (int n = 0; n < kKeys / kSpan; ++n) sum[n] = pick<T>(sum[n], sum[n], from);
  }
}

// Writes the sums of kKeys keys, times a factor or a factor of each lane, as S^T, [kKeys][lanes].
template <class T, int kSpan, int kKeys, class Factors>
FA_INLINE void store_span_sums(Vec<T> (&sum)[kKeys], const Factors& factors, T* out) {
  sum_spans<T, kSpan, kKeys>(sum);
#pragma GCC unroll 16
  for (int n = 0; n < kKeys / kSpan; ++n) store<T>(out + n * kLanes<T>, sum[n] * factors);
}

// The addresses of one span of kDotSums keys. Neighbouring keys have a constant distance.
template <class E>
struct KeyAddresses {
  static constexpr int kNear = 8;  // keys of one pointer: the address of each key is an addressing mode
  static_assert(kDotSums % kNear == 0);
  const char* first[kDotSums / kNear];
  int64_t ld, ld3, ld5, ld7;  // bytes

  FA_INLINE KeyAddresses(const E* k, int64_t stride)
      : ld(stride * static_cast<int64_t>(sizeof(E))), ld3(3 * ld), ld5(5 * ld), ld7(7 * ld) {
    asm volatile("" : "+r"(ld3), "+r"(ld5), "+r"(ld7));  // in registers, not computed for each key
    for (int n = 0; n < kDotSums / kNear; ++n) first[n] = reinterpret_cast<const char*>(k) + n * kNear * ld;
  }
  FA_INLINE const E* key(int n) const {
    const int64_t of_odd[] = {ld, ld3, ld5, ld7};
    const int i = n % kNear;
    return reinterpret_cast<const E*>(first[n / kNear] + (i % 2 ? of_odd[i / 2] : i == 6 ? 2 * ld3 : i * ld));
  }
  FA_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 4
    for (int n = 0; n < kDotSums / kNear; ++n) {
      first[n] += bytes;
      // Otherwise the compiler computes a pointer for each key, and runs out of registers.
      asm volatile("" : "+r"(first[n]));
    }
  }
};

// out = scale * S^T for kDotSums keys, rows of `k` at distance `ld`. `groups`: spans of columns. A span has `bytes`
// bytes in memory. Not inline: the addresses fill the registers, and callers would add more variables.
template <class T, int kSpan, class E>
FA_NOINLINE void lanes_block(const E* q, int64_t groups, const E* k, int64_t ld, T scale, T* out,
                             int64_t bytes, Prefetcher& ahead) {
  constexpr int L = kLanes<T>, N = kDotSums;
  Vec<T> sum[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) sum[n] = Vec<T>{};
  KeyAddresses<E> keys(k, ld);
  const auto add_span = [&]() FA_INLINE_LAMBDA {
    const auto query = load_elements(q);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[n] = multiply_add(sum[n], broadcast_span<kSpan>(keys.key(n)), query);
    keys.advance(kSpan * sizeof(E));
    q += L;
  };
  constexpr int64_t kGroups = 4;  // of one call of the prefetcher
  const int64_t lines = ceil_div(kGroups * N * bytes, 64);
  int64_t g = 0;
  for (; g + kGroups <= groups; g += kGroups) {
    ahead.lines(lines);
#pragma GCC unroll 4
    for (int n = 0; n < kGroups; ++n) add_span();
  }
  if (g < groups) ahead.lines(ceil_div((groups - g) * N * bytes, 64));
  for (; g < groups; ++g) add_span();
  store_span_sums<T, kSpan>(sum, scale, out);
}

// Copies q[r][c] of `rows` rows to lanes. Rows of `q` are padded with zeros to whole vectors.
template <class T, class E>
inline void load_query_lanes(const E* q, int64_t ldq, int64_t rows, int64_t depth, E* to) {
  const int64_t lanes = lanes_of<T>(rows);
  for_any_span<T>(rows, [&](auto span) {  // copies of a constant size are no calls of memcpy
    for (int64_t c = 0; c < depth; c += span)
      for (int64_t r = 0; r < lanes; ++r, to += span) {
        if (r < rows)
          std::memcpy(to, q + r * ldq + c, span * sizeof(E));
        else
          std::fill(to, to + span, E{});
      }
  });
}

// S^T of a tile or a chunk of keys, for rows as lanes. Omits vectors of rows. The first key is key `first_key` of the tile
// `to`. Writes whole blocks of kDotSums keys. `q`: blocks at distance kLanes * block_depth. `k`: rows of elements with whole
// spans; `copy` has room for `keys` rows in whole chunks.
template <class In, class T, class E>
inline void score_lanes(const E* q, int64_t block_depth, int64_t rows, int64_t depth, const Tile<E>& k,
                        int64_t keys, T scale, const LaneTile<T>& to, int64_t first_key, E* copy,
                        Prefetcher& ahead) {
  constexpr int L = kLanes<T>;
  if (!scores_lanes_of<In, T>(rows_of_last_block<In, T>(rows)))
    return;  // no block is left, so no key is copied
  // A chunk of keys 4 KiB apart is larger than its sets of L1. Keys 2 KiB apart fill them, but calls take 0.80 to 0.99 of the time
  // without a copy of such keys (Zen 5).
  const bool copies_far_keys = are_far_rows(k.ld * static_cast<int64_t>(sizeof(E)) / 2);
  for (int64_t j0 = 0; j0 < keys; j0 += kChunkRows) {
    const int64_t count = std::min(kChunkRows, keys - j0);
    Tile<E> chunk{k.data + j0 * k.ld, k.ld};
    const bool is_one = count == 1;  // a block multiplies this key kDotSums times; only one result is read
    const bool is_partial = count % kDotSums != 0 && !is_one;  // a block may not read past the last key
    const bool is_copy = k.data == copy;
    if (is_one) {
      chunk.ld = 0;
    } else if (!is_copy && (is_partial || copies_far_keys)) {
      const int64_t ld = round_up_to_lanes<T>(depth), span = widest_span<In, T>(rows),
                    cols = ceil_div(depth, span) * span;
      for (int64_t n = 0; n < count; ++n) {
        int64_t c = 0;
        for (; c + L <= cols; c += L)
          store_elements(copy + n * ld + c, load_elements(chunk.data + n * k.ld + c));
        if (c < cols) std::memcpy(copy + n * ld + c, chunk.data + n * k.ld + c, (cols - c) * sizeof(E));
      }
      chunk = {copy, ld};
    }
    if (is_partial) {
      E* first_row = is_copy ? copy + j0 * chunk.ld : copy;
      for (int64_t n = count; n % kDotSums != 0; ++n)
        std::fill(first_row + n * chunk.ld, first_row + (n + 1) * chunk.ld, E{});
    }
    for_each_lane_block<In, T>(rows, [&](int64_t first, int64_t some) {
      if (!scores_lanes_of<In, T>(some)) return;
      for_span<T>(some, [&](auto span) {
        constexpr int kSpan = span.value;
        for (int64_t j = 0; j < count; j += kDotSums)
          lanes_block<T, kSpan>(q + first * block_depth, ceil_div(depth, kSpan), chunk.data + j * chunk.ld,
                                chunk.ld, scale, to.at(first, some, first_key + j0 + j),
                                kSpan * sizeof(In) * (std::is_same_v<E, T> ? 1 : 2), ahead);
      });
    });
  }
}

// Returns the factors of the keys in vector `v` of S^T or P^T, [keys][kLanes / kSpan]. `factors`: of kLanes keys.
template <class T, int kSpan>
FA_INLINE Vec<T> key_factors(const T* factors, int v) {
  constexpr int L = kLanes<T>;
  if constexpr (kSpan == 1) return splat<T>(factors[v]);
  VecIndex<T> key;
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) key[i] = v * kSpan + i / (L / kSpan);
  const Vec<T> some = load<T>(factors);
  return pick<T>(some, some, key);
}

// Multiplies key j of S^T or P^T of `rows` rows, [keys][lanes], by factors[j]. `factors` and the tile have whole vectors of keys.
template <class T>
inline void multiply_keys(T* tile, int64_t keys, int64_t rows, const T* factors) {
  constexpr int64_t L = kLanes<T>;
  const int64_t lanes = lanes_of<T>(rows);
  if (lanes >= L) {
    for (int64_t j = 0; j < keys; ++j) multiply_row<T>(tile + j * lanes, factors[j], lanes);
    return;
  }
  for_any_span<T>(rows, [&](auto span) {
    constexpr int kVectors = L / span.value;  // of L keys
    for (int64_t j = 0; j < keys; j += L, tile += kVectors * L)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v)
        store<T>(tile + v * L, load<T>(tile + v * L) * key_factors<T, span.value>(factors + j, v));
  });
}

// dst[r][j] = S of row r and key j. `src` has whole vectors after its last row. Writes whole vectors of keys.
template <class T>
FA_NOINLINE void transpose_lane_scores(const T* src, int64_t lanes, int64_t keys, int64_t rows, T* dst,
                                       int64_t ld) {
  constexpr int L = kLanes<T>;
  for (int64_t j = 0; j < keys; j += L)
    for (int64_t r0 = 0; r0 < rows; r0 += L) {
      Vec<T> block[L];
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) block[n] = j + n < keys ? load<T>(src + (j + n) * lanes + r0) : Vec<T>{};
      transpose<T>(block);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r)
        if (r0 + r < rows) store<T>(dst + (r0 + r) * ld + j, block[r]);
    }
}
