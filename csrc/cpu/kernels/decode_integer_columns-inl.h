// S^T = K Q^T of decode for at most 4 rows, and keys of int8, or of int4 with one scale, on AVX2. The lanes are columns, as in
// decode_sums_of_columns-inl.h: a vector of a key is read in place, widened to int16 in registers, and multiplied by each row of Q,
// which is rounded to int16 (int16_rows-inl.h). Rows as lanes need a copy of the keys (decode_word_lanes-inl.h,
// decode_nibble_lanes-inl.h). With 2 to 4 rows, calls take 0.78 to 0.93 of their time (Zen 3). With groups of int4, each row would
// multiply by the scales.
#pragma once

#include "decode_bytes-inl.h"
#include "decode_integer_lanes-inl.h"
#include "decode_sums_of_columns-inl.h"

#if defined(FA_HAS_INTEGER_LANES) && !defined(FA_DOT_BYTES)

// The columns of 16 bytes of a key as vectors of int16.
struct ByteColumns {
  static constexpr int kVectors = 1;
  FA_INLINE void load(const int8_t* p, U32* columns) const { columns[0] = FA_WIDEN_INT8(p); }
};
struct NibbleColumns {  // the even and the odd columns
  static constexpr int kVectors = 2;
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  const Words low;
  NibbleColumns() : low(in_register(Words{} + 15)) {}  // otherwise it is made again for each block of keys
  FA_INLINE void load(const int8_t* p, U32* columns) const {
    const Words bytes = (Words)FA_WIDEN_BYTES_TO_16(p);
    columns[0] = (U32)(bytes & low);
    columns[1] = (U32)(bytes >> 4);
  }
};

// Returns how many keys a product of R rows computes: S^T of these keys, [keys][lanes], is one vector.
template <int R>
constexpr int kColumnKeys = span_of<float>(R);

// out = factors * (start + S^T) for `keys` keys, kColumnKeys at a time. Keys past `keys` read the last key again. `q`:
// [steps][kVectors][R][16 columns].
template <class Columns, int R>
FA_NOINLINE void score_integer_columns(const Pair* q, S32 start, const Rows<int8_t>& k, int64_t keys,
                                       F32 factors, float* out, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kColumnKeys<R>, kVectors = Columns::kVectors;
  constexpr int64_t kStep = 2 * L, kAtOnce = kBytesOfPrefetch / N;  // bytes
  constexpr int64_t kSteps = 2 / kVectors;                          // of a loop
  const Columns of_bytes;
  // Few columns: a prefetch for several blocks of keys. It takes as long as a tenth of the products of a block.
  const int64_t blocks = std::max<int64_t>(kAtOnce / k.cols, 1);
  int64_t left = 0;  // blocks until the next prefetch
  const int8_t* first = k.data;
  int64_t offset[N];  // of each key from the first
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) offset[n] = n * k.stride;
  float* to = out;
  for (int64_t j = 0; j < keys; j += N, first += N * k.stride, to += L) {
    if (keys - j < N)
      for (int n = 0; n < N; ++n) offset[n] = std::min<int64_t>(n, keys - 1 - j) * k.stride;
    const int8_t* key[N];
    S32 sum[R][N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) key[n] = first + offset[n];
#pragma GCC unroll 16
    for (int n = 0; n < N * R; ++n) sum[n / N][n % N] = S32{};
    const Pair* step = q;
    const auto add_step = [&](int64_t c) FA_INLINE_LAMBDA {
      U32 columns[kVectors][N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        U32 of_key[kVectors];
        of_bytes.load(key[n] + c, of_key);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) columns[v][n] = of_key[v];
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          add_products<N>(sum[r], in_register(load_elements(step + (v * R + r) * L)), columns[v]);
      step += kVectors * R * L;
    };
    for (int64_t c = 0; c < k.cols;) {
      const int64_t end = std::min(c + kAtOnce, k.cols);
      if (--left < 0) {
        ahead.lines(lines_of<int8_t>(blocks * N * (end - c)));
        left = blocks - 1;
      }
      for (; c + kSteps * kStep <= end; c += kSteps * kStep)
#pragma GCC unroll 2
        for (int n = 0; n < kSteps; ++n) add_step(c + n * kStep);
      for (; c < end; c += kStep) add_step(c);
    }
    constexpr int kLanesOut = L / N;
    S32 each[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) each[i] = i % kLanesOut < R ? sum[i % kLanesOut][i / kLanesOut] : S32{};
    store<float>(to, (F32)sum_each_by_parts<float>(each));
  }
  // In a loop of its own: in the loop above, the conversion takes a twelfth of its time, because it waits for the sums.
  for (; out < to; out += L)
    store<float>(out, __builtin_convertvector((S32)load<float>(out) + start, F32) * factors);
}

// Q of the task's heads.
struct IntegerColumns {
  static constexpr int64_t kMostRows = kLanes<float> / 2;

  Pair* q;           // [heads][kMostRows * D / 2]   for R rows: [steps][planes][R][16 columns]
  float* factors;    // [heads][lanes]   the scale of the scores, times the unit of each row
  int32_t* starts;   // [heads][lanes]   -(the offset of nibbles) sum_c q_c
  int16_t* rounded;  // [D]   a row of q
  int64_t cols;
  int planes;  // of columns: int4 has two, the even and the odd columns
  bool has_groups;

  static IntegerColumns allocate(Arena& arena, const AttentionParams& p, int64_t heads, int planes) {
    IntegerColumns b{};
    b.cols = p.sizes.head_dim;
    b.planes = planes;
    b.has_groups = planes == 2 && has_groups_of(p.varlen.cache.k_groups);
    if (b.has_groups) return b;
    b.q = arena.take<Pair>(heads * b.head_pairs());
    b.factors = arena.take<float>(heads * kLanes<float>);
    b.starts = arena.take<int32_t>(heads * kLanes<float>);
    b.rounded = arena.take<int16_t>(b.cols);
    return b;
  }

  // Whether the rows of a block are multiplied by this struct.
  bool multiplies(int64_t rows) const { return !has_groups && rows <= kMostRows; }

  // Loads the rows of the task's head `n`. Rows of `from` are padded with zeros to whole vectors.
  void load_queries(int64_t n, int64_t rows, const float* from, int64_t ld, float scale) const {
    constexpr int64_t L = kLanes<float>;
    Pair* const to = q + n * head_pairs();
    std::fill(to, to + head_pairs(), Pair{});
    std::fill(factors + n * L, factors + (n + 1) * L, 0.0f);
    std::fill(starts + n * L, starts + (n + 1) * L, 0);
    for (int64_t r = 0; r < rows; ++r) {
      const float largest = planes == 1 ? largest_of_query(cols) : kLargestInt16;
      const float factor = scale * round_row(from + r * ld, cols, largest, rounded);
      int32_t sum = 0;
      for (int64_t c = 0; c < cols; ++c) sum += rounded[c];
      for (int64_t i = n * L + r; i < (n + 1) * L; i += lanes_of<float>(rows)) {  // a vector has several keys
        factors[i] = factor;
        if (planes == 2) starts[i] = -static_cast<int32_t>(kInt4Zero) * sum;
      }
      for_column_form<BFloat16>(rows, [&](auto form_rows) { copy_row<form_rows.value>(r, to); });
    }
  }

  // factor * S^T of the task's head `n`, for `keys` keys.
  void load_scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t keys, float factor, float* out,
                   Prefetcher& ahead) const {
    constexpr int64_t L = kLanes<float>;
    const S32 start = load_sums(starts + n * L);
    const F32 of_lanes = load<float>(factors + n * L) * factor;
    const auto score = [&](auto columns) {
      for_column_form<BFloat16>(rows, [&](auto form_rows) {
        score_integer_columns<decltype(columns), form_rows.value>(q + n * head_pairs(), start, k, keys,
                                                                  of_lanes, out, ahead);
      });
    };
    planes == 2 ? score(NibbleColumns{}) : score(ByteColumns{});
  }

 private:
  int64_t head_pairs() const { return kMostRows * cols / 2; }

  // Copies `rounded` to row r of R rows.
  template <int R>
  void copy_row(int64_t r, Pair* to) const {
    constexpr int64_t kWords = 2 * kLanes<float>;
    int16_t vector[kWords];
    for (int64_t c = 0; c < cols; c += planes * kWords)
      for (int64_t plane = 0; plane < planes; ++plane) {
        for (int64_t i = 0; i < kWords; ++i) vector[i] = rounded[c + i * planes + plane];
        std::memcpy(to + ((c / kWords + plane) * R + r) * kLanes<float>, vector, sizeof(vector));
      }
  }
};

#endif
