// Tensors on the heap without a spare byte: the allocation ends with the last element, and gaps between rows are
// poisoned for AddressSanitizer. All memory starts as 0xff bytes, a NaN in every dtype.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "case.h"

namespace test {

// The name of a buffer that is allocated one element too short (the workspace: 8192 bytes too short), to test that
// the error is reported.
extern std::string short_buffer;

class Buffer {
 public:
  Buffer(size_t bytes, size_t alignment);
  char* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<char, Free> memory_;
};

class TensorBuffer {
 public:
  TensorBuffer(const std::string& name, DType dtype, const Shape& shape, const Layout& layout);
  ~TensorBuffer();
  TensorBuffer(const TensorBuffer&) = delete;
  TensorBuffer& operator=(const TensorBuffer&) = delete;

  void write(const std::vector<double>& dense);
  std::vector<double> read() const;

  void* data() const { return buffer_.data() + shift_ * size_of(dtype_); }
  int64_t stride(int dim) const { return strides_[dim]; }
  flash_attn_ext::Tensor4 view() const { return {data(), strides_[0], strides_[1], strides_[2]}; }

  // Makes the gaps readable again. Returns false if one of them was written to.
  bool open_gaps();
  bool same_bytes(const TensorBuffer& other) const;  // compares gaps, too: open both first

 private:
  template <class Gap>
  void for_each_gap(Gap gap) const;

  DType dtype_;
  Shape shape_, strides_;
  int64_t shift_, elements_;  // from the tensor's first to its last element, inclusive
  Buffer buffer_;
};

}  // namespace test
