// Clusters of two blocks, by the backward's own pipeline: each block loads half of every tile into both blocks.
#include <csrc/cuda/launch.h>
#include <csrc/cuda/shared_memory.h>
#include <csrc/cuda/sm90/tensor_map.h>
#include <csrc/cuda/sm90/pairs.cuh>

#include "unit.h"

namespace gpu_units {
namespace {

namespace sm90 = flash_attn_ext::cuda::sm90;
namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kTiles = 7, kPairs = 3, kWarps = 4, kThreads = 32 * (1 + kWarps);

template <class Tile>
struct Shared {
  sm90::PairPipeline<Tile, 1> pipeline;
};

// Every block copies all tiles to its part of `out`. Block 1 of a pair is slow, so block 0 has to wait for it.
template <class Tile>
__global__ void pair_kernel(const __grid_constant__ CUtensorMap map, uint4* out) {
  constexpr size_t kBytes = sizeof(Shared<Tile>);
  auto& [pipeline] = flash_attn_ext::cuda::shared_memory<Shared<Tile>, kBytes>();
  if (threadIdx.x == 0) {
    pipeline.init(kWarps);
    ptx::barrier_init_fence();  // publishes the barriers to TMA
  }
  sm90::begin_pair();
  if (threadIdx.x == 0) {
    for (uint32_t n = 0; n < kTiles; ++n) {
      ptx::barrier_wait(pipeline.empty[0], pipeline.parity(n) ^ 1);  // both blocks have read the last tile
      sm90::load_half(pipeline.tiles[0], map, n * Tile::kRows, 0, 0, pipeline.full[0], 0);
    }
  } else if (threadIdx.x >= 32) {
    constexpr int kPieces = sizeof(Tile) / 16;
    for (uint32_t n = 0; n < kTiles; ++n) {
      const auto* tile = reinterpret_cast<const uint4*>(&pipeline.tiles[0].bytes[0][0] + pipeline.wait(n));
      if (sm90::rank_in_pair() == 1) __nanosleep(20000);
      for (int i = threadIdx.x - 32; i < kPieces; i += 32 * kWarps)
        out[(int64_t{blockIdx.x} * kTiles + n) * kPieces + i] = tile[i];
      __syncwarp();  // all lanes have read the tile
      pipeline.release(n);
    }
  }
  sm90::end_pair();
}

template <int kRows, int kColumns>
std::string tiles_of_pairs() {
  using Tile = sm90::Panels<uint16_t, kRows, kColumns>;
  constexpr int kElements = sizeof(Tile) / 2, kLength = kTiles * kRows - 5, kBlocks = 2 * kPairs;
  std::vector<uint16_t> tensor(kLength * kColumns), expected(kBlocks * kTiles * kElements);
  for (size_t n = 0; n < tensor.size(); ++n) tensor[n] = 1 + n % 65521;
  for (int block = 0; block < kBlocks; ++block)
    for (int row = 0; row < kTiles * kRows; ++row)
      for (int c = 0; c < kColumns; ++c)
        expected[(block * kTiles + row / kRows) * kElements + Tile::offset(row % kRows, c) / 2] =
            row < kLength ? tensor[row * kColumns + c] : 0;

  const Buffer<uint16_t> in(tensor), out(expected.size());
  const flash_attn_ext::Tensor4 t{in.get(), kLength * kColumns, kLength * kColumns, kColumns};
  CUtensorMap map;
  check(sm90::encode_tensor_map(map, t, flash_attn_ext::DType::kBFloat16, kColumns, kLength, 1, 1, kRows));
  const flash_attn_ext::cuda::LaunchShape shape{kBlocks, 1, 1, kThreads, sizeof(Shared<Tile>), 2};
  check(flash_attn_ext::cuda::launch(pair_kernel<Tile>, shape, nullptr, map,
                                     reinterpret_cast<uint4*>(out.get())));
  finish();
  return first_difference(out.values(), expected, sm90::kPanelColumns);
}

}  // namespace

// The tiles of Q and dO of the backward in pairs.
std::vector<Unit> pair_units() {
  return {{"TMA: multicast of tiles of 64 x 256 in pairs of blocks", tiles_of_pairs<64, 256>}};
}

}  // namespace gpu_units
