// The instructions of a program (core/program.h) that compute.
#pragma once

#include "../../core/program_arithmetic.h"
#include "../vec/elementary-inl.h"

// A value of a program. Its vector at row r and lane c begins at p + r * row + c * lane.
template <class T>
struct ProgramSource {
  const T* p = nullptr;
  int64_t row = 0, lane = 0;

  FA_INLINE Vec<T> at(int64_t r, int64_t c) const { return load<T>(p + r * row + c * lane); }
};

// One instruction on one strip.
template <class T>
struct ProgramStep {
  int64_t rows, cols;
  T* to;
  int64_t to_row;
  ProgramSource<T> from[3];
};

// Each function calls f for the vectors of its operands, and stores the result. `s` is a copy. With a reference, a
// store might change it, so every iteration would load the strides again. The loops are not lambdas, because c++filt
// cannot read the name of a lambda in two other lambdas, and tests/cpu/test_object_files.py needs the name.
template <class T, class F>
FA_INLINE void map0(const ProgramStep<T> s, const F f) {
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols; c += kLanes<T>) store<T>(s.to + r * s.to_row + c, f(r, c));
}

template <class T, class F>
FA_INLINE void map1(const ProgramStep<T> s, const F f) {
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols; c += kLanes<T>) store<T>(s.to + r * s.to_row + c, f(s.from[0].at(r, c)));
}

template <class T, class F>
FA_INLINE void map2(const ProgramStep<T> s, const F f) {
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols; c += kLanes<T>)
      store<T>(s.to + r * s.to_row + c, f(s.from[0].at(r, c), s.from[1].at(r, c)));
}

// The same for integers: f takes and returns VecIndex.
template <class T, class F>
FA_INLINE void int_map1(const ProgramStep<T> s, const F f) {
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols; c += kLanes<T>)
      store<T>(s.to + r * s.to_row + c, (Vec<T>)f((VecIndex<T>)s.from[0].at(r, c)));
}

template <class T, class F>
FA_INLINE void int_map2(const ProgramStep<T> s, const F f) {
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.cols; c += kLanes<T>)
      store<T>(s.to + r * s.to_row + c,
               (Vec<T>)f((VecIndex<T>)s.from[0].at(r, c), (VecIndex<T>)s.from[1].at(r, c)));
}

// Clamps an index to [0, last].
template <class T>
FA_INLINE VecIndex<T> nearest_index(VecIndex<T> n, int64_t last) {
  using I = VecIndex<T>;
  using Element = std::remove_reference_t<decltype(std::declval<I>()[0])>;
  const I highest = I{} + static_cast<Element>(last);
  n = n < 0 ? I{} : n;
  return n > highest ? highest : n;
}

// a = quotient * b + rest with 0 <= rest / b < 1; both 0 where b is 0.
//
// The first quotient has the rounding error of the floating type. The quotient of the remainder has an error of at most
// 1.
template <class T>
FA_INLINE void divide_with_rest(VecIndex<T> a, VecIndex<T> b, VecIndex<T>& quotient, VecIndex<T>& rest) {
  using I = VecIndex<T>;
  using U = VecBits<T>;
  constexpr T kLargest =
      sizeof(T) == 4 ? T(2147483520.0) : T(9223372036854774784.0);  // the largest value that fits the integer
  const Vec<T> divisor = __builtin_convertvector(b, Vec<T>);
  const auto guess = [&](I x) FA_INLINE_LAMBDA {
    Vec<T> q = __builtin_convertvector(x, Vec<T>) / divisor;
    q = q > kLargest ? splat<T>(kLargest) : q;
    return __builtin_convertvector(q, I);
  };
  const I is_zero = b == 0;
  I q = guess(a);
  I r = (I)((U)a - (U)q * (U)b);
  const I more = guess(r);
  q = (I)((U)q + (U)more);
  r = (I)((U)r - (U)more * (U)b);
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n) {
    const I below = (r != 0) & ((r ^ b) < 0);
    q += below;  // -1 where true
    r = (I)((U)r + ((U)below & (U)b));
  }
  const I above = ((r ^ b) >= 0) & ((b < 0 ? r <= b : r >= b));
  q -= above;
  r = (I)((U)r - ((U)above & (U)b));
  quotient = is_zero ? I{} : q;
  rest = is_zero ? I{} : r;
}

template <class T>
FA_INLINE VecIndex<T> divide_down(VecIndex<T> a, VecIndex<T> b) {
  VecIndex<T> quotient, rest;
  divide_with_rest<T>(a, b, quotient, rest);
  return quotient;
}
template <class T>
FA_INLINE VecIndex<T> divide_to_zero(VecIndex<T> a, VecIndex<T> b) {
  VecIndex<T> quotient, rest;
  divide_with_rest<T>(a, b, quotient, rest);
  return quotient - ((quotient < 0) & (rest != 0));  // minus -1 where true
}
template <class T>
FA_INLINE VecIndex<T> rest_of_divide_down(VecIndex<T> a, VecIndex<T> b) {
  VecIndex<T> quotient, rest;
  divide_with_rest<T>(a, b, quotient, rest);
  return rest;
}

// Functions of FA_PROGRAM_ARITHMETIC that are not in vec/.
template <class T>
FA_INLINE Vec<T> magnitude(Vec<T> a) {
  return (Vec<T>)((VecBits<T>)a << 1 >> 1);
}
template <class T>
FA_INLINE Vec<T> round_down(Vec<T> a) {
  return each_lane<T>(a, [](T x) { return std::floor(x); });
}
template <class T>
FA_INLINE Vec<T> round_up(Vec<T> a) {
  return each_lane<T>(a, [](T x) { return std::ceil(x); });
}
template <class T>
FA_INLINE Vec<T> round_to_zero(Vec<T> a) {
  return each_lane<T>(a, [](T x) { return std::trunc(x); });
}
template <class T>
FA_INLINE Vec<T> round_to_even(Vec<T> a) {
  return each_lane<T>(a, [](T x) { return std::rint(x); });
}
template <class T>
FA_INLINE Vec<T> square_root(Vec<T> a) {
  return each_lane<T>(a, [](T x) { return std::sqrt(x); });
}
template <class T>
FA_INLINE Vec<T> any_exp2(Vec<T> a) {
  return exp_of_any<T>(a, T(1), T(2));
}
template <class T>
FA_INLINE Vec<T> to_float(VecIndex<T> a) {
  return __builtin_convertvector(a, Vec<T>);
}
template <class T>
FA_INLINE VecIndex<T> to_int(Vec<T> a) {
  return __builtin_convertvector(a, VecIndex<T>);
}

// The forms of FA_PROGRAM_ARITHMETIC as loops over a strip.
#define FA_PROGRAM_V1(...) map1<T>(s, [](V a) FA_INLINE_LAMBDA { return __VA_ARGS__; })
#define FA_PROGRAM_V2(...) map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return __VA_ARGS__; })
#define FA_PROGRAM_VC(...) map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return (V)(__VA_ARGS__); })
#define FA_PROGRAM_I1(...) int_map1<T>(s, [](I a) FA_INLINE_LAMBDA { return __VA_ARGS__; })
#define FA_PROGRAM_I2(...) int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return __VA_ARGS__; })
#define FA_PROGRAM_IC(...) int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)(__VA_ARGS__); })
#define FA_PROGRAM_IV(...)                 \
  map1<T>(s, [](V bits) FA_INLINE_LAMBDA { \
    const I a = (I)bits;                   \
    return __VA_ARGS__;                    \
  })
#define FA_PROGRAM_VI(...) map1<T>(s, [](V a) FA_INLINE_LAMBDA { return (V)(__VA_ARGS__); })
#define FA_PROGRAM_S(...)                                                                        \
  map0<T>(s, [from0 = s.from[0], from1 = s.from[1], from2 = s.from[2]](int64_t row, int64_t col) \
                 FA_INLINE_LAMBDA {                                                              \
                   const I a = (I)from0.at(row, col);                                            \
                   const V b = from1.at(row, col), c = from2.at(row, col);                       \
                   return __VA_ARGS__;                                                           \
                 })

template <class T>
void execute_arithmetic(Operation operation, const ProgramStep<T>& s) {
#if defined(FA_TILE_FUNCTIONS)
  FA_TILE_FUNCTIONS->execute_arithmetic(operation, &s);
#else
  using V = Vec<T>;
  using I = VecIndex<T>;
  using U = VecBits<T>;
  constexpr int kBits = 8 * sizeof(T);
  switch (operation) {
#define FA_PROGRAM_CASE(operation, form, ...) \
  case Operation::operation: return FA_PROGRAM_##form(__VA_ARGS__);
    FA_PROGRAM_ARITHMETIC(FA_PROGRAM_CASE)
#undef FA_PROGRAM_CASE
    default: return;  // checked in ops/flex/check_program.cpp
  }
#endif
}

#undef FA_PROGRAM_V1
#undef FA_PROGRAM_V2
#undef FA_PROGRAM_VC
#undef FA_PROGRAM_I1
#undef FA_PROGRAM_I2
#undef FA_PROGRAM_IC
#undef FA_PROGRAM_IV
#undef FA_PROGRAM_VI
#undef FA_PROGRAM_S
