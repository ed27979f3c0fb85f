#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace test {
namespace {

struct Format16 {
  int mantissa_bits, bias;
  int special() const { return 0x7fff >> mantissa_bits; }  // the exponent of infinity and NaN
};

Format16 format_of(DType dtype) { return dtype == DType::kBFloat16 ? Format16{7, 127} : Format16{10, 15}; }

double decode(Format16 f, uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = (bits & 0x7fff) >> f.mantissa_bits, mantissa = bits & ((1 << f.mantissa_bits) - 1);
  if (exponent == f.special())
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  const int significand = exponent ? mantissa + (1 << f.mantissa_bits) : mantissa;
  return sign * std::ldexp(significand, std::max(exponent, 1) - f.bias - f.mantissa_bits);
}

uint16_t encode(Format16 f, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0, infinity = f.special() << f.mantissa_bits;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | 1);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  const double magnitude = std::fabs(value);
  const int exponent = magnitude == 0 ? 1 - f.bias : std::max(std::ilogb(magnitude), 1 - f.bias);
  // In units of the last mantissa bit, rounded to nearest even. The hidden bit, or a carry, increments the
  // exponent.
  const double significand = std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent));
  const double bits = std::ldexp(exponent + f.bias - 1, f.mantissa_bits) + significand;
  return static_cast<uint16_t>(sign | static_cast<int>(std::min<double>(bits, infinity)));
}

}  // namespace

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kBool: return "bool";
  }
  return "?";
}

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kBool: return 1;
  }
  return 0;
}

DType accumulator_of(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

double get(DType dtype, const void* base, int64_t index) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(base)[index];
    case DType::kFloat64: return static_cast<const double*>(base)[index];
    case DType::kBFloat16:
    case DType::kFloat16: return decode(format_of(dtype), static_cast<const uint16_t*>(base)[index]);
    case DType::kBool: return static_cast<const uint8_t*>(base)[index];
  }
  return 0;
}

void put(DType dtype, void* base, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(base)[index] = static_cast<float>(value); return;
    case DType::kFloat64: static_cast<double*>(base)[index] = value; return;
    case DType::kBFloat16:
    case DType::kFloat16: static_cast<uint16_t*>(base)[index] = encode(format_of(dtype), value); return;
    case DType::kBool: static_cast<uint8_t*>(base)[index] = value != 0; return;
  }
}

double rounded(DType dtype, double value) {
  double memory = 0;
  put(dtype, &memory, 0, value);
  return get(dtype, &memory, 0);
}

uint64_t Random::bits() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::between(double low, double high) {
  return low + (high - low) * std::ldexp(static_cast<double>(bits() >> 11), -53);
}

}  // namespace test
