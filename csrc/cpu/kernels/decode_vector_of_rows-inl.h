// S^T of decode for a block of at most L rows that need a whole vector. On AVX2, decode_sums_of_columns-inl.h has another form for at
// most L / 2 rows of bfloat16, and for one block of float16.
//
// A load broadcasts kSpan neighbouring columns of a key, and kBlocks multiply-adds use it. With one load for each
// multiply-add the loads would be the limit: these CPUs have two of each in a cycle.
//
// A block has L / kSpan rows and is one vector of sums. Lane r * kSpan + i of it has column i of the block's row r. The
// sums of all spans of all blocks become S^T. Example: kSpan 2, L = 8, 8 rows. The rows of block 0 are 0, 1, 4 and 5:
//
//   q0[c] q0[c+1] q1[c] q1[c+1] q4[c] ...  times  k[c] k[c+1] k[c] k[c+1] k[c] ...
//
// AVX2 widens bfloat16 keys in registers, after the broadcast, so no copy of them is written. Several blocks of float16 share a copy
// of the keys as float32 (widens_keys_once()).
#pragma once

#include "decode_lanes-inl.h"

// Loads neighbouring columns of a key: kVectors vectors of kSpan columns, repeated in all spans.
template <class In, int kSpan>
struct KeyColumns {
  static constexpr int kVectors = 1;
  template <class V>
  FA_INLINE static void load(const In* k, V* columns) {
    columns[0] = broadcast_span<kSpan>(k);
  }
};

#if FA_VECTOR_BYTES == 32

// The even columns, then the odd columns.
template <int kSpan>
struct KeyColumns<BFloat16, kSpan> {
  static constexpr int kVectors = 2;
  FA_INLINE static void load(const BFloat16* k, F32* columns) {
    const U32 pairs = (U32)broadcast_span<kSpan>(reinterpret_cast<const float*>(k));  // two columns each
    widen_pairs(pairs, columns[0], columns[1]);
  }
};

#endif

// Whether keys of In are multiplied in place.
template <class In>
constexpr bool kHasFormInPlace = kHasVectorsOfRows && !std::is_same_v<In, Float16>;

// The form of the products. kHasThree: three blocks, for at most 3/4 of a vector of rows. Each broadcast has one use more, and
// no lanes of padding are multiplied.
template <class In, class T, bool kHasThree = false>
struct BlockForm {
  static constexpr int kSpan = kHasThree ? 4 : 2, kBlocks = kHasThree ? 3 : kSpan;
  static constexpr int kKeys = kDotSums / (kHasThree ? 2 : kBlocks);
  using Columns = KeyColumns<In, kSpan>;
  static constexpr int kStep = kSpan * Columns::kVectors;  // columns of a step
};

// Calls body(form) with an object of the BlockForm for `rows` rows.
template <class In, class T, class Body>
inline void for_form(int64_t rows, const Body& body) {
  if constexpr (kHasThreeQuarters<In, T>)
    if (rows <= kLanes<T> * 3 / 4) return body(BlockForm<In, T, true>{});
  body(BlockForm<In, T>{});
}

// Copies q[r][c] of `rows` <= L rows: kBlocks vectors for each vector of columns. Rows of `q` are padded with zeros to whole
// vectors. Lanes of missing rows repeat the last row.
template <class In, class T, class E>
inline void load_block_of_queries(const E* q, int64_t ldq, int64_t rows, int64_t depth, E* to) {
  for_form<In, T>(rows, [&](auto form) {
    using Form = decltype(form);
    constexpr int L = kLanes<T>, kSpan = Form::kSpan, kVectors = Form::Columns::kVectors,
                  kBlocks = Form::kBlocks;
    constexpr int kPart = 16 / sizeof(T), kRows = kPart / kSpan;  // rows of a block in 16 bytes
    const E* from[kBlocks][L];
    for (int b = 0; b < kBlocks; ++b)
      for (int lane = 0; lane < L; ++lane) {
        const int64_t row = lane / kPart * (kRows * kBlocks) + b * kRows + lane % kPart / kSpan;
        from[b][lane] = q + std::min(row, rows - 1) * ldq + lane % kSpan * kVectors;
      }
    if constexpr (kVectors == 1 && sizeof(E) == sizeof(T)) {  // moves whole vectors
      for (int b = 0; b < kBlocks; ++b)
        for (int64_t c = 0; c < depth; c += L) {
          Vec<T> square[L / kSpan];
#pragma GCC unroll 8
          for (int r = 0; r < L / kSpan; ++r)
            square[r] = load<T>(reinterpret_cast<const T*>(from[b][r * kSpan] + c));
          transpose_parts<T, kSpan, L, 1>(square);
          for (int64_t n = 0; n < L / kSpan && c + n * kSpan < depth; ++n)
            store<T>(reinterpret_cast<T*>(to + ((c / kSpan + n) * kBlocks + b) * L), square[n]);
        }
      return;
    }
    for (int64_t c = 0; c < depth; c += Form::kStep)
      for (int v = 0; v < kVectors; ++v)
        for (int b = 0; b < kBlocks; ++b, to += L)
#pragma GCC unroll 16
          for (int lane = 0; lane < L; ++lane) to[lane] = from[b][lane][c + v];
  });
}

// Adds the blocks, whose spans become shorter by the factor kBlocks. One lane for each row and part of its span remains. Of
// three blocks the rows come first, then zeros.
template <class T, int kBlocks>
FA_INLINE Vec<T> sum_blocks(const Vec<T> (&blocks)[kBlocks]) {
  constexpr int L = kLanes<T>, kPart = 16 / sizeof(T), kWhole = kBlocks == 3 ? 4 : kBlocks;
  const VecIndex<T> even = every_second_part<T, 1, kPart>(0), odd = every_second_part<T, 1, kPart>(1);
  Vec<T> block[kWhole] = {};
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) block[b] = blocks[b];
#pragma GCC unroll 4
  for (int count = kWhole / 2; count > 0; count /= 2)
#pragma GCC unroll 4
    for (int b = 0; b < count; ++b)
      block[b] = pick<T>(block[2 * b], block[2 * b + 1], even) + pick<T>(block[2 * b], block[2 * b + 1], odd);
  if constexpr (kBlocks == 3) {
    VecIndex<T> rows;
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) rows[i] = i < L * 3 / 4 ? i / 3 * 4 + i % 3 : 3;
    return pick<T>(block[0], block[0], rows);
  }
  return block[0];
}

// The last block of rows, if the vector of rows before it has its multiply-adds (joins_vector_of_rows()).
template <class E, class T>
struct JoinedBlock {
  const E* q;  // load_query_lanes()
  T* out;
};

// out[n] = scale * S^T of key j + n, for kKeys keys. Keys past `keys` read the last key again. kJoins: also of the block `joined`.
template <class Form, bool kJoins, class In, class T, class E>
FA_INLINE void block_of_rows(const E* q, int64_t steps, const Rows<In>& k, int64_t j, int64_t keys, T scale,
                             T* out, const JoinedBlock<E, T>& joined, Prefetcher& ahead) {
  using Columns = typename Form::Columns;
  constexpr int L = kLanes<T>, N = Form::kKeys, kBlocks = Form::kBlocks, kVectors = Columns::kVectors;
  constexpr int kAll = kBlocks + kJoins;
  constexpr int64_t kBytes = N * Form::kStep * sizeof(In);  // of a step
  static_assert(!kJoins || (Form::kSpan == 2 && kVectors == 1));
  Vec<T> sum[kAll][N];
  const In* key[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    key[n] = k.row(std::min<int64_t>(j + n, keys - 1));
#pragma GCC unroll 4
    for (int b = 0; b < kAll; ++b) sum[b][n] = Vec<T>{};
  }
  constexpr int64_t kBytesAtOnce = 256;  // of a prefetch
  int64_t until_line = 1;
  const E* q_joined = joined.q;
  for (int64_t step = 0; step < steps; ++step, q += kVectors * kBlocks * L) {
    decltype(load_elements(q)) query[kVectors][kAll];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) query[v][b] = in_register(load_elements(q + (v * kBlocks + b) * L));
    if constexpr (kJoins) {
      query[0][kBlocks] = in_register(load_elements(q_joined));
      q_joined += L;
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      decltype(load_elements(q)) columns[kVectors];
      Columns::load(key[n] + step * Form::kStep, columns);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
        for (int b = 0; b < kAll; ++b) sum[b][n] = multiply_add(sum[b][n], columns[v], query[v][b]);
    }
    if (--until_line == 0) {
      until_line = std::max<int64_t>(kBytesAtOnce / kBytes, 1);
      ahead.lines(ceil_div(until_line * kBytes, 64));
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    Vec<T> of_key[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) of_key[b] = sum[b][n];
    store<T>(out + n * L, sum_blocks<T, kBlocks>(of_key) * scale);
  }
  if constexpr (kJoins) store_span_sums<T, Form::kSpan, N>(sum[kBlocks], scale, joined.out);
}

// S^T of some keys of a tile. Writes whole blocks of keys. `copy` has room for the keys.
template <class In, class T, class E>
inline void score_block_of_rows(const E* q, int64_t rows, Rows<In> k, int64_t keys, T scale, T* out, In* copy,
                                const JoinedBlock<E, T>& joined, Prefetcher& ahead) {
  for_form<In, T>(rows, [&](auto form) {
    using Form = decltype(form);
    k = with_whole_steps(k, keys, Form::kStep, copy);
    const int64_t steps = k.cols / Form::kStep;
    if constexpr (kHasVectorsOfRows && std::is_same_v<In, T>) {
      if (joined.q) {
        for (int64_t j = 0; j < keys; j += Form::kKeys)
          block_of_rows<Form, true>(q, steps, k, j, keys, scale, out + j * kLanes<T>,
                                    {joined.q, joined.out + j * kLanes<T> / 2}, ahead);
        return;
      }
    }
    for (int64_t j = 0; j < keys; j += Form::kKeys)
      block_of_rows<Form, false>(q, steps, k, j, keys, scale, out + j * kLanes<T>, joined, ahead);
  });
}
