// Interprets a program (core/program.h) on one element of the score matrix. The rows of core/program_arithmetic.h define
// the instructions, as on a CPU.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "../../core/program_arithmetic.h"
#include "captured.cuh"

// Compiled once for all kernels of a source.
#if defined(__CUDACC__)
#define FA_NOT_INLINED __noinline__
#else
#define FA_NOT_INLINED
#endif

namespace flash_attn_ext::cuda::simt {

// The functions of FA_PROGRAM_ARITHMETIC.
namespace arithmetic {

template <class T>
using Index = std::conditional_t<sizeof(T) == sizeof(double), int64_t, int32_t>;

template <class T>
__device__ T splat(T a) {
  return a;
}
template <class T>
__device__ T power(T a, T b) {
  return std::pow(a, b);
}
template <class T>
__device__ T magnitude(T a) {
  return std::abs(a);
}
template <class T>
__device__ T round_down(T a) {
  return std::floor(a);
}
template <class T>
__device__ T round_up(T a) {
  return std::ceil(a);
}
template <class T>
__device__ T round_to_zero(T a) {
  return std::trunc(a);
}
template <class T>
__device__ T round_to_even(T a) {
  return std::rint(a);
}
template <class T>
__device__ T square_root(T a) {
  return std::sqrt(a);
}
template <class T>
__device__ T any_exp(T a) {
  return std::exp(a);
}
template <class T>
__device__ T any_exp2(T a) {
  return std::exp2(a);
}
template <class T>
__device__ T any_expm1(T a) {
  return std::expm1(a);
}
template <class T>
__device__ T log(T a) {
  return std::log(a);
}
template <class T>
__device__ T log2(T a) {
  return std::log2(a);
}
template <class T>
__device__ T log1p(T a) {
  return std::log1p(a);
}
template <class T>
__device__ T tanh(T a) {
  return std::tanh(a);
}
template <class T>
__device__ T erf(T a) {
  return std::erf(a);
}
template <class T>
__device__ T sine(T a) {
  return std::sin(a);
}
template <class T>
__device__ T cosine(T a) {
  return std::cos(a);
}
template <class T>
__device__ T to_float(Index<T> a) {
  return static_cast<T>(a);
}
template <class T>
__device__ Index<T> to_int(T a) {
  return static_cast<Index<T>>(a);
}

// b == -1 is a separate case, because the quotient of the least integer overflows.
template <class T>
__device__ Index<T> divide_to_zero(Index<T> a, Index<T> b) {
  using U = std::make_unsigned_t<Index<T>>;
  return b == 0 ? 0 : b == -1 ? static_cast<Index<T>>(U{} - static_cast<U>(a)) : a / b;
}
template <class T>
__device__ Index<T> divide_down(Index<T> a, Index<T> b) {
  const bool rounds_up = b != 0 && b != -1 && a % b != 0 && (a ^ b) < 0;
  return divide_to_zero<T>(a, b) - rounds_up;
}
template <class T>
__device__ Index<T> rest_of_divide_down(Index<T> a, Index<T> b) {
  if (b == 0 || b == -1) return 0;
  const Index<T> rest = a % b;
  return rest != 0 && (rest ^ b) < 0 ? rest + b : rest;
}

}  // namespace arithmetic

// The arguments of a function: batch, head, indices of query and key, the score, and the gradient of the new score.
template <class T>
struct ProgramPoint {
  int64_t b, h, query, key;
  T score, gradient;
};

template <class T>
__device__ arithmetic::Index<T> bits_of(T x) {
  arithmetic::Index<T> bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
template <class T>
__device__ T number_of(arithmetic::Index<T> bits) {
  T x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Returns the nearest index in [0, last].
template <class I>
__device__ I nearest_index(I n, int64_t last) {
  return n < 0 ? 0 : n > last ? static_cast<I>(last) : n;
}

// Returns the bits of the program's result; 0 for a program that only adds to captured elements.
template <class T>
FA_NOT_INLINED __device__ arithmetic::Index<T> run_program(const DeviceFunctions* functions,
                                                           const DeviceProgram& program,
                                                           const ProgramPoint<T>& point) {
  using namespace arithmetic;
  using V = T;
  using I = Index<T>;
  using U = std::make_unsigned_t<I>;
  constexpr int kBits = 8 * sizeof(T);
  I values[DeviceFunctions::kMostValues];
  values[DeviceFunctions::kScore] = bits_of(point.score);
  values[DeviceFunctions::kGradient] = bits_of(point.gradient);
#pragma unroll 1
  for (int n = 0; n < program.count; ++n) {
    const DeviceInstruction& in = functions->instructions[program.first + n];
    const auto word = [&](int m) { return values[in.from[m]]; };
    const auto number = [&](int m) { return number_of<T>(values[in.from[m]]); };
    I result = 0;
    switch (static_cast<Operation>(in.operation)) {
      case Operation::float_constant:
      case Operation::int_constant: result = static_cast<I>(in.immediate[0]); break;
      case Operation::bool_constant: result = in.immediate[0] ? -1 : 0; break;
      case Operation::batch: result = static_cast<I>(point.b); break;
      case Operation::head: result = static_cast<I>(point.h); break;
      case Operation::query: result = static_cast<I>(point.query); break;
      case Operation::key: result = static_cast<I>(point.key); break;
      case Operation::gather:
      case Operation::gather_int: {
        const bool is_int = static_cast<Operation>(in.operation) == Operation::gather_int;
        const I* elements = static_cast<const I*>(is_int ? functions->captured_ints : functions->captured);
        result = elements[in.immediate[0] + nearest_index(word(0), in.immediate[1] - 1)];
        break;
      }
      case Operation::wrap_index: {
        const I index = word(0), size = static_cast<I>(in.immediate[0]);
        result = nearest_index(index < 0 ? index + size : index, size - 1);
        break;
      }
      case Operation::scatter_add:
        add_captured(functions->captured_sums, in.immediate[0] + nearest_index(word(0), in.immediate[1] - 1),
                     number(1));
        continue;  // without a target
#define FA_PROGRAM_V1(...) \
  const V a = number(0);   \
  result = bits_of<T>(__VA_ARGS__)
#define FA_PROGRAM_V2(...)              \
  const V a = number(0), b = number(1); \
  result = bits_of<T>(__VA_ARGS__)
#define FA_PROGRAM_VC(...)              \
  const V a = number(0), b = number(1); \
  result = (__VA_ARGS__) ? -1 : 0
#define FA_PROGRAM_I1(...) \
  const I a = word(0);     \
  result = __VA_ARGS__
#define FA_PROGRAM_I2(...)          \
  const I a = word(0), b = word(1); \
  result = __VA_ARGS__
#define FA_PROGRAM_IC(...)          \
  const I a = word(0), b = word(1); \
  result = (__VA_ARGS__) ? -1 : 0
#define FA_PROGRAM_IV(...) \
  const I a = word(0);     \
  result = bits_of<T>(__VA_ARGS__)
#define FA_PROGRAM_VI(...) \
  const V a = number(0);   \
  result = __VA_ARGS__
#define FA_PROGRAM_S(...)                        \
  const I a = word(0), b = word(1), c = word(2); \
  result = __VA_ARGS__
#define FA_PROGRAM_CASE(operation, form, ...) \
  case Operation::operation: {                \
    FA_PROGRAM_##form(__VA_ARGS__);           \
    break;                                    \
  }
        FA_PROGRAM_ARITHMETIC(FA_PROGRAM_CASE)
#undef FA_PROGRAM_CASE
#undef FA_PROGRAM_V1
#undef FA_PROGRAM_V2
#undef FA_PROGRAM_VC
#undef FA_PROGRAM_I1
#undef FA_PROGRAM_I2
#undef FA_PROGRAM_IC
#undef FA_PROGRAM_IV
#undef FA_PROGRAM_VI
#undef FA_PROGRAM_S
      default: break;  // checked in ops/flex/check_program.cpp
    }
    values[in.target] = result;
  }
  return program.result < 0 ? 0 : values[program.result];
}

}  // namespace flash_attn_ext::cuda::simt
