// The instructions of a program (program.h) that compute, one row each. The kernels of every device expand these rows: on a
// CPU the values are SIMD vectors, on a GPU they are numbers.
//
// Rows: operation, form, result. The forms name the operands:
//
//   V1  V a             V result    V: floating-point values. T: the type of one of them
//   V2  V a, b          V result    I: integers as wide; a bool is -1 or 0
//   VC  V a, b          a comparison
//   I1  I a             I result    U: unsigned integers as wide; their overflow is defined
//   I2  I a, b          I result
//   IC  I a, b          a comparison
//   IV  I a             V result
//   VI  V a             I result
//   S   I a, V b, V c   V result: b and c are bits, of integers too
//
// Each device supplies the functions, as any_exp<T>(V). kBits is the width of a value.
#pragma once

// clang-format off
#define FA_PROGRAM_ARITHMETIC(X)                                                                    \
  X(add, V2, a + b)                                                                                 \
  X(subtract, V2, a - b)                                                                            \
  X(multiply, V2, a * b)                                                                            \
  X(divide, V2, a / b)                                                                              \
  X(minimum, V2, ((a < b) | (a != a)) ? a : b)                                                      \
  X(maximum, V2, ((a > b) | (a != a)) ? a : b)                                                      \
  X(power, V2, power<T>(a, b))                                                                      \
  X(negate, V1, -a)                                                                                 \
  X(absolute, V1, magnitude<T>(a))                                                                  \
  X(sign, V1, a > T(0) ? splat<T>(T(1)) : a < T(0) ? splat<T>(T(-1)) : V{})                         \
  X(floor, V1, round_down<T>(a))                                                                    \
  X(ceil, V1, round_up<T>(a))                                                                       \
  X(truncate, V1, round_to_zero<T>(a))                                                              \
  X(round, V1, round_to_even<T>(a))                                                                 \
  X(square_root, V1, square_root<T>(a))                                                             \
  X(reciprocal_root, V1, T(1) / square_root<T>(a))                                                  \
  X(exp, V1, any_exp<T>(a))                                                                         \
  X(exp2, V1, any_exp2<T>(a))                                                                       \
  X(expm1, V1, any_expm1<T>(a))                                                                     \
  X(log, V1, log<T>(a))                                                                             \
  X(log2, V1, log2<T>(a))                                                                           \
  X(log1p, V1, log1p<T>(a))                                                                         \
  X(tanh, V1, tanh<T>(a))                                                                           \
  X(sigmoid, V1, T(1) / (any_exp<T>(-a) + T(1)))                                                    \
  X(erf, V1, erf<T>(a))                                                                             \
  X(sine, V1, sine<T>(a))                                                                           \
  X(cosine, V1, cosine<T>(a))                                                                       \
  X(select, S, a ? b : c)                                                                           \
  X(less, VC, a < b)                                                                                \
  X(less_equal, VC, a <= b)                                                                         \
  X(equal, VC, a == b)                                                                              \
  X(int_add, I2, (I)((U)a + (U)b))                                                                  \
  X(int_subtract, I2, (I)((U)a - (U)b))                                                             \
  X(int_multiply, I2, (I)((U)a * (U)b))                                                             \
  X(int_divide, I2, divide_down<T>(a, b))                                                           \
  X(int_truncated_divide, I2, divide_to_zero<T>(a, b))                                              \
  X(int_modulo, I2, rest_of_divide_down<T>(a, b))                                                   \
  X(int_minimum, I2, a < b ? a : b)                                                                 \
  X(int_maximum, I2, a > b ? a : b)                                                                 \
  X(int_absolute, I1, a < 0 ? (I)(U{} - (U)a) : a)                                                  \
  X(int_and, I2, a & b)                                                                             \
  X(int_or, I2, a | b)                                                                              \
  X(int_xor, I2, a ^ b)                                                                             \
  X(int_not, I1, ~a)                                                                                \
  X(shift_left, I2, ((b < 0) | (b >= kBits)) ? I{} : (I)((U)a << ((U)b & (kBits - 1))))             \
  X(shift_right, I2, a >> (((b < 0) | (b >= kBits)) ? I{} + (kBits - 1) : b))                       \
  X(int_select, S, a ? b : c)                                                                       \
  X(int_less, IC, a < b)                                                                            \
  X(int_less_equal, IC, a <= b)                                                                     \
  X(int_equal, IC, a == b)                                                                          \
  X(bool_and, I2, a & b)                                                                            \
  X(bool_or, I2, a | b)                                                                             \
  X(bool_xor, I2, a ^ b)                                                                            \
  X(bool_not, I1, ~a)                                                                               \
  X(int_to_float, IV, to_float<T>(a))                                                               \
  X(float_to_int, VI, to_int<T>(a))                                                                 \
  X(bool_to_int, I1, a & 1)
// clang-format on
