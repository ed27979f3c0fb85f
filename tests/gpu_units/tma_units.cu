// Hopper's copy engine: one tile with the 128-byte swizzle, partly outside of its tensor, and one addition in
// bulk.
#include <cuda.h>

#include "unit.h"

namespace gpu_units {
namespace {

constexpr int kThreads = 128;
// A tensor of 100 x 88 elements of 16 bits, in rows of 96, and a box of 64 x 64 that leaves it on two sides.
constexpr int kRows = 100, kColumns = 88, kPitch = 96, kBox = 64, kTop = 50, kLeft = 40;
constexpr int kBoxBytes = kBox * kBox * 2;
constexpr int kNeverLanded = 1;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__global__ void tma_kernel(const __grid_constant__ CUtensorMap map, uint16_t* out, int* status) {
  __shared__ alignas(1024) uint16_t tile[kBox * kBox];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t barrier_at = shared_address(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_at), "n"(kBoxBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], [%4];" ::"r"(shared_address(tile)),
        "l"(&map), "r"(kLeft), "r"(kTop), "r"(barrier_at)
        : "memory");
  }
  __syncthreads();
  uint32_t landed = 0;
  for (int tries = 0; tries < 100000 && !landed; ++tries)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(landed)
                 : "r"(barrier_at)
                 : "memory");
  if (!landed) *status = kNeverLanded;
  for (int n = threadIdx.x; n < kBox * kBox; n += kThreads) out[n] = tile[n];
}

CUtensorMap tensor_map(const uint16_t* data) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) throw CudaError("the driver has no cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {kColumns, kRows}, pitch[] = {kPitch * 2};
  const cuuint32_t box[] = {kBox, kBox}, every[] = {1, 1};
  CUtensorMap map;
  const CUresult encoded = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<uint16_t*>(data), sizes, pitch, box, every,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded != CUDA_SUCCESS)
    throw CudaError("cuTensorMapEncodeTiled gave error " + std::to_string(encoded));
  return map;
}

std::string tma_load() {
  std::vector<uint16_t> tensor(kRows * kPitch), expected(kBox * kBox);
  for (int n = 0; n < kRows * kPitch; ++n) tensor[n] = n + 1;
  for (int r = 0; r < kBox; ++r)
    for (int c = 0; c < kBox; ++c) {
      const bool inside = kTop + r < kRows && kLeft + c < kColumns;
      expected[swizzled(r, 2 * c) / 2] = inside ? tensor[(kTop + r) * kPitch + kLeft + c] : 0;
    }
  const Buffer<uint16_t> in(tensor), out(expected.size());
  const Buffer<int> status(std::vector<int>{0});
  tma_kernel<<<1, kThreads>>>(tensor_map(in.get()), out.get(), status.get());
  finish();
  if (status.values()[0] == kNeverLanded) return "the tile did not land: its mbarrier never completed";
  return first_difference(out.values(), expected, kBox);
}

constexpr int kSums = 256, kBlocks = 4;

// Block b adds b + n to element n.
__global__ void bulk_add_kernel(float* sums) {
  __shared__ alignas(16) float terms[kSums];
  for (int n = threadIdx.x; n < kSums; n += kThreads) terms[n] = blockIdx.x + n;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(sums)),
                 "r"(shared_address(terms)), "n"(kSums * 4)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
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

std::vector<Unit> tma_units() {
  return {
      {"TMA load of a 64 x 64 tile, 128-byte swizzle, zeros outside", tma_load},
      {"cp.reduce.async.bulk add.f32 by 4 blocks", bulk_add},
  };
}

}  // namespace gpu_units
