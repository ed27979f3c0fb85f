// Loads tiles of q, k, v and dout from the caller's strided memory into scratch of the accumulator's type, and stores
// results.
#pragma once

#include "../vec/convert-inl.h"
#include "../vec/math-inl.h"
#include "tiling-inl.h"

// A tile that can be read: scratch, or the caller's memory if it already has the right type and padding.
template <class T>
struct Tile {
  const T* data;
  int64_t ld;
};

// Rows in the caller's memory or in a copy.
template <class In>
struct Rows {
  const In* data;
  int64_t stride, cols;

  const In* row(int64_t n) const { return data + n * stride; }
};

// Calls body(Row{}), where Row is the type of the caller's rows: the type E of the products' operands, or a 16-bit type
// if E is float. A pass that names the type of the rows only here is compiled once for all dtypes with float32 operands.
template <class E, class Body>
FA_INLINE auto for_row_type(DType dtype, const Body& body) {
  if constexpr (std::is_same_v<E, float>) {
    if (dtype == DType::kBFloat16) return body(BFloat16{});
    if (dtype == DType::kFloat16) return body(Float16{});
  }
  return body(E{});
}

// Calls body(Row{}), where Row has the size of the caller's rows. A pass that needs only the size has one copy of its code
// for bfloat16 and float16.
template <class E, class Body>
FA_INLINE auto for_row_size(DType dtype, const Body& body) {
  if constexpr (std::is_same_v<E, float>) {
    if (bytes_of(dtype) == 2) return body(BFloat16{});
  }
  return body(E{});
}

// Returns whether rows are converted to the accumulator's type T before the products. E: the type of the operands.
template <class E, class T>
bool converts_rows(DType dtype) {
  return !std::is_same_v<E, T> || bytes_of(dtype) != sizeof(T);
}

// Converts rows x cols of src to T, each row padded with zeros to whole vectors. Returns src itself if there is
// nothing to pad or convert.
template <class In, class T>
inline Tile<T> load_tile(const In* src, int64_t stride, int64_t rows, int64_t cols, T* scratch) {
  constexpr int L = kLanes<T>;
  if constexpr (std::is_same_v<In, T>) {
    if (cols % L == 0) return {src, stride};
  }
  const int64_t ld = round_up_to_lanes<T>(cols);
  for (int64_t r = 0; r < rows; ++r) {
    const In* in = src + r * stride;
    T* out = scratch + r * ld;
    int64_t c = 0;
    for (; c + L <= cols; c += L) store<T>(out + c, load_as<In, T>(in + c));
    if (c < cols) store<T>(out + c, load_tail_as<In, T>(in + c, cols - c));
  }
  return {scratch, ld};
}

// load_tile() for rows [s, s + rows) of a head of `t`. E: the type of the operands.
template <class E, class T>
inline Tile<T> load_tile_of(const Tensor4& t, DType dtype, int64_t b, int64_t h, int64_t s, int64_t rows,
                            int64_t cols, T* scratch) {
  return for_row_type<E>(dtype, [&](auto element) {
    using Row = decltype(element);
    return load_tile<Row, T>(t.row<Row>(b, h, s), t.stride_s, rows, cols, scratch);
  });
}

// dst[c][r] = src[r][c]. Rows of dst are padded with zeros to ld, a whole number of vectors.
template <class In, class T>
inline void load_tile_transposed(const In* src, int64_t stride, int64_t rows, int64_t cols, T* dst,
                                 int64_t ld) {
  constexpr int L = kLanes<T>;
  for (int64_t r0 = 0; r0 < rows; r0 += L) {
    for (int64_t c0 = 0; c0 < cols; c0 += L) {
      Vec<T> block[L];
      const int64_t n = std::min<int64_t>(L, cols - c0);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) {
        const In* in = src + (r0 + r) * stride + c0;
        block[r] = r0 + r >= rows ? Vec<T>{} : load_columns<T>(in, n);
      }
      transpose<T>(block);
#pragma GCC unroll 16
      for (int c = 0; c < L; ++c)
        if (c < n) store<T>(dst + (c0 + c) * ld + r0, block[c]);
    }
  }
}

// load_tile_transposed() for rows [s, s + rows) of a head of `t`. E: the type of the operands.
template <class E, class T>
inline void load_tile_transposed_of(const Tensor4& t, DType dtype, int64_t b, int64_t h, int64_t s,
                                    int64_t rows, int64_t cols, T* dst, int64_t ld) {
  for_row_type<E>(dtype, [&](auto element) {
    using Row = decltype(element);
    load_tile_transposed<Row, T>(t.row<Row>(b, h, s), t.stride_s, rows, cols, dst, ld);
  });
}

// dst[c] = factor * src[c], rounded to Out.
template <class Out, class T>
inline void store_row(Out* dst, const T* src, int64_t cols, T factor) {
  constexpr int L = kLanes<T>;
  int64_t c = 0;
  for (; c + L <= cols; c += L) store_as<Out, T>(dst + c, factor * load<T>(src + c));
  if (c < cols) store_tail_as<Out, T>(dst + c, factor * load<T>(src + c), cols - c);
}

// Initial maximum and sum of a query row. A sink acts as a key before the first key, with e^(sink - m) = 1. The maximum
// is in units of `unit`.
template <class T>
struct RowStart {
  T max, sum;
};
template <class T>
inline RowStart<T> start_of_row(const SinkParams& sink, int64_t b, int64_t h, T unit = T(1)) {
  const T score = sink ? sink.of<T>(b, h) : kNegInf<T>;
  return {score / unit, score == kNegInf<T> ? T(0) : T(1)};
}

// Completes a query row: out = O / l and lse = m + log l, with m in units of `unit`. If no key is visible, l = 0:
// then out = 0 and lse = -inf by contract. A NaN score leaves l = NaN.
template <class Out, class T>
inline void finish_row(Out* dst, const T* out, int64_t cols, T row_max, T unit, T row_sum, T& lse) {
  store_row<Out, T>(dst, out, cols, row_sum == T(0) ? T(0) : T(1) / row_sum);
  lse = row_sum == T(0) ? kNegInf<T> : row_max * unit + std::log(row_sum);
}

// finish_row() for row s of a head of `t`. E: the type of the operands.
template <class E, class T>
inline void finish_row_of(const Tensor4& t, DType dtype, int64_t b, int64_t h, int64_t s, const T* out,
                          int64_t cols, T row_max, T unit, T row_sum, T& lse) {
  for_row_type<E>(dtype, [&](auto element) {
    using Row = decltype(element);
    finish_row<Row, T>(t.row<Row>(b, h, s), out, cols, row_max, unit, row_sum, lse);
  });
}

// dst += src over whole vectors.
template <class T>
inline void add_rows(T* dst, const T* src, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes<T>) store<T>(dst + c, load<T>(dst + c) + load<T>(src + c));
}

template <class In, class T>
inline bool rows_are_finite(const Rows<In>& r, int64_t rows) {
  constexpr int L = kLanes<T>;
  // 0 unless Inf or NaN. Four chains, because in one chain each sum would wait for the sum before
  Vec<T> probe[4] = {};
  for (int64_t c = 0; c < r.cols; c += L) {
    const auto add = [&](int chain, int64_t j) FA_INLINE_LAMBDA {
      probe[chain] += load_columns<T>(r.row(j) + c, r.cols - c) * T(0);
    };
    int64_t j = 0;
    for (; j + 4 <= rows; j += 4)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) add(n, j + n);
    for (; j < rows; ++j) add(0, j);
  }
  return sum_lanes<T>((probe[0] + probe[1]) + (probe[2] + probe[3])) == T(0);
}

// Returns sum_c a[c] * b[c], accumulated in T in a fixed order.
template <class In, class T>
inline T dot_rows(const In* a, const In* b, int64_t cols) {
  constexpr int L = kLanes<T>;
  Vec<T> sum = {};
  int64_t c = 0;
  for (; c + L <= cols; c += L) sum += load_as<In, T>(a + c) * load_as<In, T>(b + c);
  if (c < cols) sum += load_tail_as<In, T>(a + c, cols - c) * load_tail_as<In, T>(b + c, cols - c);
  return sum_lanes<T>(sum);
}

// dot_rows() for row s of a head of `a` and `b`. E: the type of the operands.
template <class E, class T>
inline T dot_rows_of(const Tensor4& a, const Tensor4& b, DType dtype, int64_t batch, int64_t h, int64_t s,
                     int64_t cols) {
  return for_row_type<E>(dtype, [&](auto element) {
    using Row = decltype(element);
    return dot_rows<Row, T>(a.row<Row>(batch, h, s), b.row<Row>(batch, h, s), cols);
  });
}
