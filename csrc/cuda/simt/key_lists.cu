#include "key_lists.h"

#include "../launch.h"
#include "../shared_memory.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::simt {
namespace {

constexpr int kKeysOfThread = 64;

struct SortMemory {
  int32_t numbers[kThreads];
  int32_t counts[kThreads];
};

// A block sorts one row. A thread marks the numbers of 64 neighbouring keys in the bits of a word, so a duplicate sets
// a bit that is already set. If there are more keys than bits, the block reads the row several times.
__global__ void __launch_bounds__(kThreads) sort_kernel(const KeyLists lists) {
  auto& shared = shared_memory<SortMemory>();
  const int64_t count = lists.indices.count, row = int64_t{blockIdx.x} * count;
  int32_t* sorted = lists.entries + row;
  int64_t length = 0;
  for (int64_t first = 0; first < lists.limit; first += kThreads * kKeysOfThread) {
    const int64_t own = first + int64_t{threadIdx.x} * kKeysOfThread;
    uint64_t marks = 0;
    for (int64_t n0 = 0; n0 < count; n0 += kThreads) {
      __syncthreads();  // all threads have read the last numbers
      const int64_t n = n0 + threadIdx.x, number = n < count ? lists.indices.numbers[row + n] : -1;
      shared.numbers[threadIdx.x] = 0 <= number && number < lists.limit ? static_cast<int32_t>(number) : -1;
      __syncthreads();  // publishes the numbers
      for (int t = 0; t < kThreads; ++t) {
        const int64_t bit = shared.numbers[t] - own;
        if (0 <= bit && bit < kKeysOfThread) marks |= uint64_t{1} << bit;
      }
    }
    // The loop's barriers came after all threads had read the last counts.
    shared.counts[threadIdx.x] = __popcll(marks);
    __syncthreads();  // publishes the counts
    int32_t before = 0, all = 0;
    for (int t = 0; t < kThreads; ++t) {
      before += t < static_cast<int>(threadIdx.x) ? shared.counts[t] : 0;
      all += shared.counts[t];
    }
    int64_t at = length + before;
    for (int bit = 0; bit < kKeysOfThread; ++bit)
      if (marks >> bit & 1) sorted[at++] = static_cast<int32_t>(own + bit);
    length += all;
  }
  if (threadIdx.x == 0) lists.lengths[blockIdx.x] = static_cast<int32_t>(length);
}

}  // namespace

cudaError_t launch_sort(const KeyLists& lists, cudaStream_t stream) {
  const LaunchShape shape{lists.indices.count == 0 ? 0 : lists.rows, 1, 1, kThreads, sizeof(SortMemory)};
  return launch(sort_kernel, shape, stream, lists);
}

}  // namespace flash_attn_ext::cuda::simt
