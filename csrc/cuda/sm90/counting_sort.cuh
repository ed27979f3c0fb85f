// A stable counting sort by one block: longest first.
#pragma once

#include "../../core/splits.h"
#include "../lane_rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// A thread has a bin of lengths, and a warp has a part of the items.
struct CountingSort {
  static constexpr int kThreads = 512, kWarps = kThreads / 32, kBins = kThreads, kBinBits = 9;
  static_assert(1 << kBinBits == kBins);

  int next
      [kWarps]
      [kBins];  // first the items of a warp in a bin, then the position of the warp's next item of this bin
  int of_warp[kWarps];  // items, for sums over the block

  // The sum over the threads before, and over all threads. Between two sums, the caller waits for the block.
  struct Sums {
    int before, all;
  };
  __device__ Sums sum_of_threads(int x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = x;  // of the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_sync(kAllLanes, sum, (lane - distance) & 31);
      sum += lane >= distance ? other : 0;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();  // publishes of_warp
    Sums sums{sum - x, 0};
    for (int n = 0; n < kWarps; ++n) {
      sums.before += n < warp ? of_warp[n] : 0;
      sums.all += of_warp[n];
    }
    return sums;
  }

  // Calls place(item, length, position) for the items [0, items) of at least length 0. `longest`: no item is longer. If it
  // exceeds the bins, similar lengths share a bin and keep their order. Returns the number of items with a position. The
  // caller waits for the block before it reads what place() has stored.
  template <class Length, class Place>
  __device__ int longest_first(int items, int longest, const Length& length_of, const Place& place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = static_cast<int>(ceil_div(items, kThreads)) * 32, begin = warp * part;
    const int end = items < begin + part ? items : begin + part;
    int shift = 0;
    while (longest >> shift >= kBins) ++shift;

    // Calls use(item, length, position) for the items of this warp, 32 at a time, and counts them in `next`.
    const auto count = [&](const auto& use) {
#pragma unroll 1
      for (int first = begin; first < end; first += 32) {
        const int item = first + lane, length = item < end ? length_of(item) : -1;
        const bool exists = length >= 0;
        const int bin = kBins - 1 - (exists ? length >> shift : 0);
        uint32_t same = __ballot_sync(kAllLanes, exists);  // lanes of the same bin
#pragma unroll
        for (int bit = 0; bit < kBinBits; ++bit) {
          const uint32_t set = __ballot_sync(kAllLanes, bin >> bit & 1);
          same &= bin >> bit & 1 ? set : ~set;
        }
        const int before = __popc(same & ((1u << lane) - 1)), position = next[warp][bin] + before;
        __syncwarp();  // all lanes have read `next`
        if (exists && before == 0) next[warp][bin] += __popc(same);
        __syncwarp();  // publishes `next` to the warp
        if (exists) use(item, length, position);
      }
    };
    for (int n = 0; n < kWarps; ++n) next[n][threadIdx.x] = 0;
    __syncthreads();  // publishes the zeros
    count([](int, int, int) {});
    __syncthreads();  // publishes the counts
    int of_bin = 0;
    for (int n = 0; n < kWarps; ++n) of_bin += next[n][threadIdx.x];
    const Sums sums = sum_of_threads(of_bin);
    int position = sums.before;
    for (int n = 0; n < kWarps; ++n) {
      const int counted = next[n][threadIdx.x];
      next[n][threadIdx.x] = position;
      position += counted;
    }
    __syncthreads();  // publishes the positions
    count(place);
    return sums.all;
  }
};

}  // namespace flash_attn_ext::cuda::sm90
