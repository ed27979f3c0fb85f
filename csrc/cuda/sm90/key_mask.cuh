// The kernel that computes the bits of key_mask.h.
#pragma once

#include "../launch.h"
#include "../shared_memory.h"
#include "band.h"
#include "key_mask.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kKeyMaskThreads = 256;

// A block computes one sequence; its warps compute tiles alternately.
template <int kKeys>
__global__ void __launch_bounds__(kKeyMaskThreads)
    key_mask_kernel(const AttentionParams p, const KeyMask mask) {
  static_assert(kKeys <= kMaxTileKeys);
  constexpr int kWarps = kKeyMaskThreads / 32;
  struct Shared {
    int begin[kWarps], end[kWarps];
  };
  auto& shared = shared_memory<Shared>();
  const int b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, word = lane % kWordsOfTile;
  int begin = mask.tiles, end = 0;
  for (int tile = warp; tile < mask.tiles; tile += kWarps) {
    uint32_t bits = 0;
    bool any = false;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int eight = lane / kWordsOfTile * 2 + n / 2, key = 8 * eight + 2 * word + n % 2;
      const int64_t j = int64_t{tile} * kKeys + key;
      const bool inside = key < kKeys && j < p.sizes.seqlen_k;  // keys outside are hidden by the band
      const bool attends = inside && mask_shows_key(p.mask, b, j);
      any |= attends;
      bits |= uint32_t{attends || !inside} << (2 * eight + n % 2);
    }
#pragma unroll
    for (int lanes = kWordsOfTile; lanes < 32; lanes *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, lanes);
    if (lane < kWordsOfTile) mask.words[(int64_t{b} * mask.tiles + tile) * kWordsOfTile + lane] = bits;
    if (__ballot_sync(0xffffffffu, any) == 0) continue;
    if (begin > tile) begin = tile;
    end = tile + 1;
  }
  if (lane == 0) {
    shared.begin[warp] = begin;
    shared.end[warp] = end;
  }
  __syncthreads();  // protects the warps' first and last tiles: thread 0 reads them after this
  if (threadIdx.x != 0) return;
  for (int n = 1; n < kWarps; ++n) {
    begin = begin < shared.begin[n] ? begin : shared.begin[n];
    end = end > shared.end[n] ? end : shared.end[n];
  }
  mask.seen[2 * b] = begin;
  mask.seen[2 * b + 1] = end;
}

// Does nothing without a mask.
template <int kKeys>
cudaError_t launch_key_mask(const AttentionParams& p, const KeyMask& mask, cudaStream_t stream) {
  const LaunchShape shape{mask ? p.sizes.batch : 0, 1, 1, kKeyMaskThreads,
                          2 * kKeyMaskThreads / 32 * sizeof(int)};
  return launch(key_mask_kernel<kKeys>, shape, stream, p, mask);
}

}  // namespace flash_attn_ext::cuda::sm90
