// One SIMD vector of float or double, in GCC/Clang vector extensions. Each isa_*.cpp includes it once, inside its
// target region and namespace (target_region.h). FA_VECTOR_BYTES is the ISA's register width.
#pragma once

#if !defined(FA_ISA_NAME)  // an editor reads this file alone
#include "../for_editors.h"
#endif

template <class T>
struct VecOf;

template <>
struct VecOf<float> {
  typedef float V __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef float Unaligned __attribute__((vector_size(FA_VECTOR_BYTES), aligned(4), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef int32_t Index __attribute__((vector_size(FA_VECTOR_BYTES)));
};

template <>
struct VecOf<double> {
  typedef double V __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef double Unaligned __attribute__((vector_size(FA_VECTOR_BYTES), aligned(8), may_alias));
  typedef uint64_t Bits __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef int64_t Index __attribute__((vector_size(FA_VECTOR_BYTES)));
};

template <class T>
using Vec = typename VecOf<T>::V;
template <class T>
using VecBits = typename VecOf<T>::Bits;
template <class T>
using VecIndex = typename VecOf<T>::Index;

template <class T>
constexpr int kLanes = FA_VECTOR_BYTES / sizeof(T);

template <class T>
constexpr int64_t round_up_to_lanes(int64_t n) {
  return ceil_div(n, kLanes<T>) * kLanes<T>;
}

template <class T>
constexpr T kNegInf = -std::numeric_limits<T>::infinity();

template <class T>
FA_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VecOf<T>::Unaligned*>(p);
}

template <class T>
FA_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename VecOf<T>::Unaligned*>(p) = x;
}

template <class T>
FA_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // minus, not plus: -0 - 0 is -0, so the compiler folds it to a broadcast
}

template <class T>
FA_INLINE VecIndex<T> iota() {
  VecIndex<T> r;
  for (int i = 0; i < kLanes<T>; ++i) r[i] = i;
  return r;
}

// max(number, NaN) may be the number or the NaN. The softmax does not depend on it.
template <class T>
FA_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
#if defined(FA_MAX_PS)  // other compilers generate the instruction
  if constexpr (sizeof(T) == 4) {
    return FA_MAX_PS(a, b);
  } else {
    return FA_MAX_PD(a, b);
  }
#else
  return a < b ? b : a;
#endif
}

#if defined(__clang__)

// r[i] = (a, b)[from[i]], where (a, b) is a vector of twice the length.
template <class T>
FA_INLINE Vec<T> pick(Vec<T> a, Vec<T> b, VecIndex<T> from) {
  Vec<T> r;
  for (int i = 0; i < kLanes<T>; ++i) r[i] = from[i] < kLanes<T> ? a[from[i]] : b[from[i] - kLanes<T>];
  return r;
}

#else

template <class T>
FA_INLINE Vec<T> pick(Vec<T> a, Vec<T> b, VecIndex<T> from) {
  return __builtin_shuffle(a, b, from);
}

#endif

// Rotates the lanes of x down by d.
template <class T>
FA_INLINE Vec<T> rotate(Vec<T> x, int d) {
  VecIndex<T> from = {};
  for (int i = 0; i < kLanes<T>; ++i) from[i] = (i + d) % kLanes<T>;
  return pick<T>(x, x, from);
}

// Returns the sum of the lanes, in a fixed order: halves, quarters, ...
template <class T>
FA_INLINE T sum_lanes(Vec<T> x) {
#pragma GCC unroll 8
  for (int d = kLanes<T> / 2; d > 0; d /= 2) x += rotate<T>(x, d);
  return x[0];
}

template <class T>
FA_INLINE T max_lanes(Vec<T> x) {
#pragma GCC unroll 8
  for (int d = kLanes<T> / 2; d > 0; d /= 2) x = max<T>(x, rotate<T>(x, d));
  return x[0];
}

// Indices for pick(a, b): in each span of kSpan lanes, every second part of kPart lanes from `first` on, first of a,
// then of b. Example: kPart 1, kSpan 4, first 0 gives a0 a2 b0 b2.
// One instruction if kPart = 1 and a span is 16 bytes, or if a part is 16 bytes and a span is the vector.
template <class T, int kPart, int kSpan>
FA_INLINE VecIndex<T> every_second_part(int first) {
  constexpr int L = kLanes<T>, kHalf = kSpan / kPart / 2;
  VecIndex<T> from;
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    const int part = i % kSpan / kPart, of_b = part >= kHalf;
    from[i] = of_b * L + i / kSpan * kSpan + (2 * (part - of_b * kHalf) + first) * kPart + i % kPart;
  }
  return from;
}

// Interleaves the lanes of a and b. a becomes the first half of a0 b0 a1 b1 ..., and b the second half.
template <class T>
FA_INLINE void interleave_lanes(Vec<T>& a, Vec<T>& b) {
  constexpr int L = kLanes<T>;
  VecIndex<T> first, second;
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    first[i] = i / 2 + i % 2 * L;
    second[i] = L / 2 + first[i];
  }
  const Vec<T> low = pick<T>(a, b, first);
  b = pick<T>(a, b, second);
  a = low;
}

// The inverse: a0 a1 a2 ... and b0 b1 b2 ... become a0 a2 ... b0 b2 ... and a1 a3 ... b1 b3 ...
template <class T>
FA_INLINE void separate_lanes(Vec<T>& a, Vec<T>& b) {
  const Vec<T> even = pick<T>(a, b, every_second_part<T, 1, kLanes<T>>(0));
  b = pick<T>(a, b, every_second_part<T, 1, kLanes<T>>(1));
  a = even;
}

// In each span of lanes: transposes the square of parts in rows[0], rows[kStep], rows[2 * kStep], ...
template <class T, int kPart, int kSpan, int kStep>
FA_INLINE void transpose_parts(Vec<T>* rows) {
  constexpr int kParts = kSpan / kPart;
  const VecIndex<T> even = every_second_part<T, kPart, kSpan>(0), odd = every_second_part<T, kPart, kSpan>(1);
#pragma GCC unroll 4
  for (int steps = 1; steps < kParts; steps *= 2) {
    Vec<T> next[kParts];
#pragma GCC unroll 8
    for (int n = 0; n < kParts / 2; ++n) {
      const Vec<T> a = rows[2 * n * kStep], b = rows[(2 * n + 1) * kStep];
      next[n] = pick<T>(a, b, even);
      next[kParts / 2 + n] = pick<T>(a, b, odd);
    }
#pragma GCC unroll 16
    for (int n = 0; n < kParts; ++n) rows[n * kStep] = next[n];
  }
}

// Transposes the square block rows[kLanes][kLanes] in registers: first lanes within 16 bytes, which is cheap, then
// parts of 16 bytes.
template <class T>
FA_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int L = kLanes<T>, kPart = 16 / sizeof(T);
  static_assert(L % kPart == 0);
#pragma GCC unroll 16
  for (int r = 0; r < L; r += kPart) transpose_parts<T, 1, kPart, 1>(rows + r);
#pragma GCC unroll 16
  for (int r = 0; r < kPart; ++r) transpose_parts<T, kPart, L, kPart>(rows + r);
}

// Indices that exchange the off-diagonal d x d blocks of a 2d x 2d block of rows. For rows a and b = a + d: the new
// rows are pick(a, b, upper) and pick(a, b, lower).
template <class T>
struct Exchange {
  VecIndex<T> upper, lower;
};

template <class T>
FA_INLINE Exchange<T> exchange_at(int d) {
  constexpr int L = kLanes<T>;
  Exchange<T> e;
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    e.upper[i] = i & d ? L + i - d : i;
    e.lower[i] = i & d ? L + i : i + d;
  }
  return e;
}

// Returns a vector: lane i is `combine` over the lanes of rows[i]. It is a transposition that combines pairs of rows,
// so each step halves the number of rows. The order is the order of sum_lanes() and max_lanes().
template <class T, class Combine>
FA_INLINE Vec<T> combine_each(Vec<T> (&rows)[kLanes<T>], const Combine& combine) {
  constexpr int L = kLanes<T>;
#pragma GCC unroll 8
  for (int d = L / 2; d > 0; d /= 2) {
    const Exchange<T> e = exchange_at<T>(d);
#pragma GCC unroll 16
    for (int r = 0; r < d; ++r)
      rows[r] = combine(pick<T>(rows[r], rows[r + d], e.upper), pick<T>(rows[r], rows[r + d], e.lower));
  }
  return rows[0];
}

template <class T>
FA_INLINE Vec<T> sum_each(Vec<T> (&rows)[kLanes<T>]) {
  return combine_each<T>(rows, [](Vec<T> a, Vec<T> b) FA_INLINE_LAMBDA { return a + b; });
}

template <class T>
FA_INLINE Vec<T> max_each(Vec<T> (&rows)[kLanes<T>]) {
  return combine_each<T>(rows, [](Vec<T> a, Vec<T> b) FA_INLINE_LAMBDA { return max<T>(a, b); });
}
