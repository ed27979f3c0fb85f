// Conversions between memory and double for every dtype, independent of the kernels' conversions.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace test {

using flash_attn_ext::DType;

const char* name_of(DType dtype);
int64_t size_of(DType dtype);
DType accumulator_of(DType dtype);

double get(DType dtype, const void* base, int64_t index);
void put(DType dtype, void* base, int64_t index, double value);
double rounded(DType dtype, double value);  // to the nearest value of the dtype

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double between(double low, double high);
  bool chance(double p) { return between(0, 1) < p; }

 private:
  uint64_t state_;
};

}  // namespace test
