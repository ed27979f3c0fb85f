// The instructions of a program (core/program.h) that compute.
#pragma once

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

// Each calls f for the vectors of its operands, and stores the result. `s` is a copy: a store may change what a reference
// refers to, and then every iteration loads the strides again. The loops are written out: of a lambda within a
// lambda within a lambda, c++filt cannot read the name, and tests/cpu/test_object_files.py needs it.
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
// The first quotient is off by the rounding of the floating type. The quotient of the remainder is off by 1 at most.
template <class T>
FA_INLINE void divide_down(VecIndex<T> a, VecIndex<T> b, VecIndex<T>& quotient, VecIndex<T>& rest) {
  using I = VecIndex<T>;
  using U = VecBits<T>;
  constexpr T kLargest =
      sizeof(T) == 4 ? T(2147483520.0) : T(9223372036854774784.0);  // that an integer takes
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
void execute_arithmetic(Operation operation, const ProgramStep<T>& s) {
  using V = Vec<T>;
  using I = VecIndex<T>;
  using U = VecBits<T>;
  constexpr int kBits = 8 * sizeof(T);
  switch (operation) {
    case Operation::add: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return a + b; });
    case Operation::subtract: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return a - b; });
    case Operation::multiply: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return a * b; });
    case Operation::divide: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return a / b; });
    case Operation::minimum:
      return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return ((a < b) | (a != a)) ? a : b; });
    case Operation::maximum:
      return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return ((a > b) | (a != a)) ? a : b; });
    case Operation::power: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return power<T>(a, b); });
    case Operation::negate: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return -a; });
    case Operation::absolute: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return (V)((U)a << 1 >> 1); });
    case Operation::sign:
      return map1<T>(s, [](V a) FA_INLINE_LAMBDA {
        return a > T(0) ? splat<T>(T(1)) : a < T(0) ? splat<T>(T(-1)) : V{};
      });
    case Operation::floor:
      return map1<T>(s,
                     [](V a) FA_INLINE_LAMBDA { return each_lane<T>(a, [](T x) { return std::floor(x); }); });
    case Operation::ceil:
      return map1<T>(s,
                     [](V a) FA_INLINE_LAMBDA { return each_lane<T>(a, [](T x) { return std::ceil(x); }); });
    case Operation::truncate:
      return map1<T>(s,
                     [](V a) FA_INLINE_LAMBDA { return each_lane<T>(a, [](T x) { return std::trunc(x); }); });
    case Operation::round:
      return map1<T>(s,
                     [](V a) FA_INLINE_LAMBDA { return each_lane<T>(a, [](T x) { return std::rint(x); }); });
    case Operation::square_root:
      return map1<T>(s,
                     [](V a) FA_INLINE_LAMBDA { return each_lane<T>(a, [](T x) { return std::sqrt(x); }); });
    case Operation::reciprocal_root:
      return map1<T>(
          s, [](V a) FA_INLINE_LAMBDA { return T(1) / each_lane<T>(a, [](T x) { return std::sqrt(x); }); });
    case Operation::exp: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return any_exp<T>(a); });
    case Operation::exp2:
      return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return exp_of_any<T>(a, T(1), T(2)); });
    case Operation::expm1: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return any_expm1<T>(a); });
    case Operation::log: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return log<T>(a); });
    case Operation::log2: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return log2<T>(a); });
    case Operation::log1p: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return log1p<T>(a); });
    case Operation::tanh: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return tanh<T>(a); });
    case Operation::sigmoid:
      return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return T(1) / (any_exp<T>(-a) + T(1)); });
    case Operation::erf: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return erf<T>(a); });
    case Operation::sine: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return sine<T>(a); });
    case Operation::cosine: return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return cosine<T>(a); });
    case Operation::select:
    case Operation::int_select:
      return map0<T>(s, [c0 = s.from[0], c1 = s.from[1], c2 = s.from[2]](int64_t r, int64_t c)
                            FA_INLINE_LAMBDA { return (I)c0.at(r, c) ? c1.at(r, c) : c2.at(r, c); });
    case Operation::less: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return (V)(a < b); });
    case Operation::less_equal: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return (V)(a <= b); });
    case Operation::equal: return map2<T>(s, [](V a, V b) FA_INLINE_LAMBDA { return (V)(a == b); });
    case Operation::int_add:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)((U)a + (U)b); });
    case Operation::int_subtract:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)((U)a - (U)b); });
    case Operation::int_multiply:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)((U)a * (U)b); });
    case Operation::int_divide:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA {
        I quotient, rest;
        divide_down<T>(a, b, quotient, rest);
        return quotient;
      });
    case Operation::int_truncated_divide:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA {
        I quotient, rest;
        divide_down<T>(a, b, quotient, rest);
        return quotient - ((quotient < 0) & (rest != 0));  // minus -1 where true
      });
    case Operation::int_modulo:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA {
        I quotient, rest;
        divide_down<T>(a, b, quotient, rest);
        return rest;
      });
    case Operation::int_minimum:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return a < b ? a : b; });
    case Operation::int_maximum:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return a > b ? a : b; });
    case Operation::int_absolute:
      return int_map1<T>(s, [](I a) FA_INLINE_LAMBDA { return a < 0 ? (I)(U{} - (U)a) : a; });
    case Operation::int_and:
    case Operation::bool_and: return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return a & b; });
    case Operation::int_or:
    case Operation::bool_or: return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return a | b; });
    case Operation::int_xor:
    case Operation::bool_xor: return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return a ^ b; });
    case Operation::int_not:
    case Operation::bool_not: return int_map1<T>(s, [](I a) FA_INLINE_LAMBDA { return ~a; });
    case Operation::shift_left:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA {
        return ((b < 0) | (b >= kBits)) ? I{} : (I)((U)a << ((U)b & (kBits - 1)));
      });
    case Operation::shift_right:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA {
        return a >> (((b < 0) | (b >= kBits)) ? I{} + (kBits - 1) : b);
      });
    case Operation::int_less: return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)(a < b); });
    case Operation::int_less_equal:
      return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)(a <= b); });
    case Operation::int_equal: return int_map2<T>(s, [](I a, I b) FA_INLINE_LAMBDA { return (I)(a == b); });
    case Operation::int_to_float:
      return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return __builtin_convertvector((I)a, V); });
    case Operation::float_to_int:
      return map1<T>(s, [](V a) FA_INLINE_LAMBDA { return (V) __builtin_convertvector(a, I); });
    case Operation::bool_to_int: return int_map1<T>(s, [](I a) FA_INLINE_LAMBDA { return a & 1; });
    default: return;  // checked in ops/check_program.cpp
  }
}
