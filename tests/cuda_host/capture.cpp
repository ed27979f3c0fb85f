#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "capture.h"

namespace cuda_host {
namespace {

bool captures = false;
std::vector<std::function<cudaError_t()>> recorded;

}  // namespace

bool record(const std::function<cudaError_t()>& work) {
  if (captures) recorded.push_back(work);
  return captures;
}

std::shared_ptr<void> copy_arguments(const void* arguments, size_t bytes) {
  constexpr size_t kAlignment = 128;  // of a tensor map
  const size_t allocated = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::shared_ptr<void> copy(std::aligned_alloc(kAlignment, allocated), std::free);
  std::memcpy(copy.get(), arguments, bytes);
  return copy;
}

cudaError_t replay() {
  for (const auto& work : recorded)
    if (const cudaError_t status = work()) return status;
  return cudaSuccess;
}

}  // namespace cuda_host

void begin_capture() {
  cuda_host::recorded.clear();
  cuda_host::captures = true;
}
void end_capture() { cuda_host::captures = false; }
