// Hopper's copy engine by the kernels' own functions: tiles of (B, H, S, D) tensors, partly outside of them,
// and additions in bulk.
#include <csrc/cuda/sm90/tensor_map.h>
#include <csrc/cuda/sm90/pipeline.cuh>

#include "unit.h"

namespace gpu_units {
namespace {

namespace sm90 = flash_attn_ext::cuda::sm90;
namespace ptx = flash_attn_ext::cuda::ptx;
using flash_attn_ext::DType;
using flash_attn_ext::Tensor4;

constexpr int kThreads = 128;

// The loaded tensor: rows of a head, or of several heads that share a key head.
struct HeadTile {
  int row, h, b;
  template <class Tile>
  __device__ void load(Tile& tile, const CUtensorMap& map, ptx::Barrier& landed) const {
    sm90::load_tile(tile, map, row, h, b, landed);
  }
};
struct GroupTile {
  int in_group, row, h_kv, b;
  template <class Tile>
  __device__ void load(Tile& tile, const CUtensorMap& map, ptx::Barrier& landed) const {
    sm90::load_group_tile(tile, map, in_group, row, h_kv, b, landed);
  }
};

// Copies a tile to shared memory by TMA, and its bytes to `out`.
template <class Tile, class From>
__global__ void tile_kernel(const __grid_constant__ CUtensorMap map, From from, uint4* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ ptx::Barrier landed;
  auto& tile = *reinterpret_cast<Tile*>(memory);
  if (threadIdx.x == 0) {
    ptx::barrier_init(landed, 1);  // this thread
    ptx::barrier_init_fence();     // TMA sees the barrier
    from.load(tile, map, landed);
  }
  __syncthreads();               // all threads see the barrier
  ptx::barrier_wait(landed, 0);  // TMA has written the tile
  for (int n = threadIdx.x; n < sizeof(Tile) / 16; n += kThreads)
    out[n] = reinterpret_cast<const uint4*>(memory)[n];
}

// The tile that lands, compared element for element.
template <class Tile, class From>
std::string difference_of(const CUtensorMap& map, const From& from, const std::vector<uint16_t>& expected) {
  const Buffer<uint16_t> out(expected.size());
  const auto kernel = tile_kernel<Tile, From>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Tile)));
  kernel<<<1, kThreads, sizeof(Tile)>>>(map, from, reinterpret_cast<uint4*>(out.get()));
  finish();
  return first_difference(out.values(), expected, sm90::kPanelColumns);
}

// Tensors as torch has them after a transpose. The other heads are between one row and the next row of a head, and a
// gap follows each row. `kBeyond` rows of the tile are outside.
template <int kRows, int kColumns>
std::string tile_of_four_dimensions() {
  using Tile = sm90::Panels<uint16_t, kRows, kColumns>;
  constexpr int kBatch = 2, kHeads = 3, kLength = 333, kBeyond = kRows / 2 - 3, kGap = 8;
  constexpr int kHeadStride = kColumns, kRowStride = kHeads * kColumns + kGap,
                kBatchStride = kLength * kRowStride;
  constexpr int kB = 1, kH = 2, kRow = kLength - (kRows - kBeyond);
  std::vector<uint16_t> tensor(kBatch * kBatchStride), expected(sizeof(Tile) / 2);
  for (size_t n = 0; n < tensor.size(); ++n) tensor[n] = 1 + n % 65521;
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c)
      expected[Tile::offset(r, c) / 2] =
          r < kRows - kBeyond ? tensor[kB * kBatchStride + kH * kHeadStride + (kRow + r) * kRowStride + c]
                              : 0;

  const Buffer<uint16_t> in(tensor);
  Tensor4 t{};
  t.data = in.get();
  t.stride_b = kBatchStride;
  t.stride_h = kHeadStride;
  t.stride_s = kRowStride;
  CUtensorMap map;
  check(sm90::encode_tensor_map(map, t, DType::kBFloat16, kColumns, kLength, kHeads, kBatch, kRows));
  return difference_of<Tile>(map, HeadTile{kRow, kH, kB}, expected);
}

// Five heads of a group in a box of eight, query by query; the last queries of the tile lie outside.
template <int kColumns>
std::string tile_of_a_group() {
  constexpr int kRows = 128, kHeadsOfTile = 8, kGroup = 5, kGroups = 3, kLength = 77, kQuery = 70,
                kGroupOfTile = 1;
  using Tile = sm90::Panels<uint16_t, kRows, kColumns>;
  constexpr int kHeads = kGroup * kGroups, kRowStride = kHeads * kColumns;
  std::vector<uint16_t> tensor(kLength * kRowStride), expected(sizeof(Tile) / 2);
  for (size_t n = 0; n < tensor.size(); ++n) tensor[n] = 1 + n % 65521;
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) {
      const int query = kQuery + r / kHeadsOfTile, head = r % kHeadsOfTile;
      const bool inside = query < kLength && head < kGroup;
      const int at = query * kRowStride + (kGroupOfTile * kGroup + head) * kColumns + c;
      expected[Tile::offset(r, c) / 2] = inside ? tensor[at] : 0;
    }

  const Buffer<uint16_t> in(tensor);
  CUtensorMap map;
  check(sm90::encode_tensor_map(map, in.get(), sm90::map_element(DType::kBFloat16), kColumns,
                                {{kGroup, kColumns, kHeadsOfTile},
                                 {kLength, kRowStride, kRows / kHeadsOfTile},
                                 {kGroups, kGroup * kColumns},
                                 {1, 0}}));
  return difference_of<Tile>(map, GroupTile{0, kQuery, kGroupOfTile, 0}, expected);
}

// A warp's 16 rows of out, which threads have written to shared memory.
template <class Tile>
__global__ void store_kernel(const __grid_constant__ CUtensorMap map, int columns, int row, int h, int b) {
  constexpr int kColumns = Tile::kCount * sm90::kPanelColumns, kElements = sizeof(Tile) / 2;
  __shared__ Tile tile;
  for (int n = threadIdx.x; n < kElements; n += kThreads)
    *reinterpret_cast<uint16_t*>(&tile.bytes[0][0] + Tile::offset(n / kColumns, n % kColumns)) = n;
  ptx::proxy_fence();  // publishes this thread's writes to TMA
  __syncthreads();     // all threads have
  if (threadIdx.x != 0) return;
  for (int n = 0; n * sm90::kPanelColumns < columns; ++n)
    ptx::store_box(&map, {n * sm90::kPanelColumns, row, h, b}, tile.bytes[n]);
  ptx::bulk_commit();
  ptx::bulk_wait_read();
}

// Its last rows and columns are outside the tensor: memory there does not change.
template <int kColumns>
std::string stored_tile() {
  constexpr int kRows = 16, kBatch = 2, kHeads = 3, kLength = 93, kBeyond = 5, kGap = 16;
  constexpr int kD = kColumns - 8, kHeadStride = kD + kGap, kRowStride = kHeads * kHeadStride,
                kBatchStride = kLength * kRowStride, kB = 0, kH = 1, kRow = kLength - (kRows - kBeyond);
  std::vector<uint16_t> expected(kBatch * kBatchStride, 0xffff);
  for (int r = 0; r < kRows - kBeyond; ++r)
    for (int c = 0; c < kD; ++c)
      expected[kB * kBatchStride + kH * kHeadStride + (kRow + r) * kRowStride + c] = r * kColumns + c;

  const Buffer<uint16_t> out(expected.size());
  const Tensor4 t{out.get(), kBatchStride, kHeadStride, kRowStride};
  CUtensorMap map;
  check(sm90::encode_tensor_map(map, t, DType::kBFloat16, kD, kLength, kHeads, kBatch, kRows));
  store_kernel<sm90::Panels<uint16_t, kRows, kColumns>><<<1, kThreads>>>(map, kD, kRow, kH, kB);
  finish();
  return first_difference(out.values(), expected, kRowStride);
}

template <int kRows, int kColumns>
Unit tile_unit() {
  return {"TMA: tile of " + std::to_string(kRows) + " x " + std::to_string(kColumns) + " of (B, H, S, D)",
          tile_of_four_dimensions<kRows, kColumns>};
}

constexpr int kSums = 256, kBlocks = 4;

// Block b adds b + n to element n.
__global__ void bulk_add_kernel(float* sums) {
  __shared__ alignas(16) float terms[kSums];
  for (int n = threadIdx.x; n < kSums; n += kThreads) terms[n] = blockIdx.x + n;
  ptx::proxy_fence();  // publishes this thread's writes to the copy engine
  __syncthreads();     // all of them have
  if (threadIdx.x == 0) {
    ptx::bulk_add(sums, terms, kSums);
    ptx::bulk_commit();
    ptx::bulk_wait();
  }
}

std::string bulk_add() {
  std::vector<float> start(kSums), expected(kSums);
  for (int n = 0; n < kSums; ++n) {
    start[n] = 1000 * n;
    expected[n] = start[n] + kBlocks * n + kBlocks * (kBlocks - 1) / 2;
  }
  const Buffer<float> sums(start);
  bulk_add_kernel<<<kBlocks, kThreads>>>(sums.get());
  finish();
  return first_difference(sums.values(), expected, kSums);
}

}  // namespace

// The boxes of the kernels: Q, K and V of the forward, and all four tensors of the backward.
std::vector<Unit> tma_units() {
  return {
      tile_unit<64, 64>(),
      tile_unit<128, 64>(),
      tile_unit<192, 64>(),
      tile_unit<64, 128>(),
      tile_unit<128, 128>(),
      tile_unit<128, 256>(),
      tile_unit<80, 256>(),
      tile_unit<64, 256>(),
      {"TMA: tile of five heads of a group", tile_of_a_group<128>},
      {"TMA: store of 16 x 64", stored_tile<64>},
      {"TMA: store of 16 x 256", stored_tile<256>},
      {"cp.reduce.async.bulk add.f32 by 4 blocks", bulk_add},
  };
}

}  // namespace gpu_units
