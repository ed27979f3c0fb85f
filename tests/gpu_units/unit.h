// Shared by the units. A unit is one claim about the hardware; its run returns an error message.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpu_units {

struct Unit {
  std::string name;
  std::function<std::string()> run;  // empty: as expected; else the first difference
};

std::vector<Unit> backward_units();
std::vector<Unit> pair_units();
std::vector<Unit> registers_units();
std::vector<Unit> sm80_units();
std::vector<Unit> tma_units();
std::vector<Unit> wgmma_units();

// A CUDA call that failed. Results of later calls are meaningless.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw CudaError(cudaGetErrorString(status));
}

// Waits for the kernel just launched.
inline void finish() {
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
}

// Device memory, filled with bytes 0xff: unwritten elements are NaN or 65535.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    check(cudaMalloc(&data_, bytes()));
    check(cudaMemset(data_, 0xff, bytes()));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  T* get() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    check(cudaMemcpy(result.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }
  size_t count_;
  T* data_ = nullptr;
};

// Of two row-major matrices.
template <class T>
std::string first_difference(const std::vector<T>& got, const std::vector<T>& expected, size_t columns) {
  size_t wrong = 0, first = 0;
  for (size_t n = got.size(); n-- > 0;) {
    if (got[n] == expected[n]) continue;
    ++wrong;
    first = n;
  }
  if (wrong == 0) return "";
  return "element (" + std::to_string(first / columns) + ", " + std::to_string(first % columns) + "): got " +
         std::to_string(got[first]) + ", expected " + std::to_string(expected[first]) + "; " +
         std::to_string(wrong) + " of " + std::to_string(got.size()) + " are wrong";
}

// Small integers, so that every product and sum is exact; no two rows or columns are alike.
constexpr int small_integer(int row, int column) { return (7 * row + 3 * column + row * column) % 9 - 4; }

}  // namespace gpu_units
