#include "buffers.h"

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstring>

namespace test {

std::string short_buffer;

namespace {

Shape strides_of(const Shape& s, const Layout& l) {
  if (l.transposed) {
    const int64_t row = s[2] + l.gap;
    return {s[1] * s[3] * row, s[3] * row, 1, row};
  }
  const int64_t row = s[3] + l.gap;
  if (l.heads_innermost) return {s[2] * s[1] * row, row, s[1] * row, 1};
  return {s[1] * s[2] * row, s[2] * row, row, 1};
}

int64_t span_of(const Shape& s, const Shape& strides) {
  int64_t last = 0;
  for (int dim = 0; dim < 4; ++dim) last += (s[dim] - 1) * strides[dim];
  return count(s) == 0 ? 0 : last + 1;
}

}  // namespace

Buffer::Buffer(size_t bytes, size_t alignment) : bytes_(bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) != 0) std::abort();
  memory_.reset(static_cast<char*>(memory));
  std::memset(memory, 0xff, bytes);
}

TensorBuffer::TensorBuffer(const std::string& name, DType dtype, const Shape& shape, const Layout& layout)
    : dtype_(dtype),
      shape_(shape),
      strides_(strides_of(shape, layout)),
      shift_(layout.shift),
      elements_(span_of(shape, strides_) - (count(shape) > 0 && name == short_buffer ? 1 : 0)),
      buffer_((shift_ + elements_) * size_of(dtype), 64) {
  for_each_gap([](const char* gap, size_t bytes) { ASAN_POISON_MEMORY_REGION(gap, bytes); });
}

TensorBuffer::~TensorBuffer() { ASAN_UNPOISON_MEMORY_REGION(buffer_.data(), buffer_.bytes()); }

template <class Gap>
void TensorBuffer::for_each_gap(Gap gap) const {
  const bool transposed = strides_[2] < strides_[3];
  const int row = transposed ? 3 : 2, inner = transposed ? 2 : 3;
  for (int64_t a = 0; a < shape_[0]; ++a)
    for (int64_t b = 0; b < shape_[1]; ++b)
      for (int64_t r = 0; r < shape_[row]; ++r) {
        const int64_t end = a * strides_[0] + b * strides_[1] + r * strides_[row] + shape_[inner];
        // The next row in memory: of this head, or of the next head if heads are innermost.
        const int64_t row_length = std::min(strides_[row], shape_[1] > 1 ? strides_[1] : strides_[row]);
        const int64_t next = std::min(end - shape_[inner] + row_length, elements_);
        if (next <= end) continue;
        gap(static_cast<const char*>(data()) + end * size_of(dtype_), (next - end) * size_of(dtype_));
      }
}

void TensorBuffer::write(const std::vector<double>& dense) {
  size_t n = 0;
  for (int64_t a = 0; a < shape_[0]; ++a)
    for (int64_t b = 0; b < shape_[1]; ++b)
      for (int64_t c = 0; c < shape_[2]; ++c)
        for (int64_t d = 0; d < shape_[3]; ++d, ++n) {
          const int64_t offset = a * strides_[0] + b * strides_[1] + c * strides_[2] + d * strides_[3];
          if (offset < elements_) put(dtype_, data(), offset, dense[n]);
        }
}

std::vector<double> TensorBuffer::read() const {
  std::vector<double> dense;
  dense.reserve(count(shape_));
  for (int64_t a = 0; a < shape_[0]; ++a)
    for (int64_t b = 0; b < shape_[1]; ++b)
      for (int64_t c = 0; c < shape_[2]; ++c)
        for (int64_t d = 0; d < shape_[3]; ++d)
          dense.push_back(
              get(dtype_, data(), a * strides_[0] + b * strides_[1] + c * strides_[2] + d * strides_[3]));
  return dense;
}

bool TensorBuffer::open_gaps() {
  ASAN_UNPOISON_MEMORY_REGION(buffer_.data(), buffer_.bytes());
  bool untouched = true;
  const auto is_ff = [](char byte) { return byte == '\xff'; };
  for_each_gap([&](const char* gap, size_t bytes) { untouched &= std::all_of(gap, gap + bytes, is_ff); });
  return untouched && std::all_of(buffer_.data(), static_cast<char*>(data()), is_ff);
}

bool TensorBuffer::same_bytes(const TensorBuffer& other) const {
  return buffer_.bytes() == other.buffer_.bytes() &&
         std::memcmp(buffer_.data(), other.buffer_.data(), buffer_.bytes()) == 0;
}

}  // namespace test
