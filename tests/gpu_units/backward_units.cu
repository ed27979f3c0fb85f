// The work of the sm90 backward on one tile of dS, by its own functions. stmatrix stores dS to shared memory.
// A wgmma reads both operands by rows: dQ = dS K. The sums go to global memory in bulk, block after block.
#include <csrc/cuda/sm90/backward_tile.cuh>

#include "unit.h"

namespace gpu_units {
namespace {

namespace sm90 = flash_attn_ext::cuda::sm90;
namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kThreads = 128, kSide = 64, kBlocks = 3;
using Tile = sm90::Panels<__nv_bfloat16, kSide, kSide>;

int ds_value(int key, int query) { return small_integer(key, query); }
int k_value(int key, int column) { return small_integer(key + 3, 2 * column); }

struct Shared {
  Tile ds, k;
  float sums[kSide / 8][kThreads][4];
};

// ds[key][query] and k[key][column], in bfloat16, row by row.
__global__ void __launch_bounds__(kThreads)
    dq_kernel(const __nv_bfloat16* ds, const __nv_bfloat16* k, float* sums) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  for (int n = threadIdx.x; n < kSide * kSide; n += kThreads)
    *reinterpret_cast<__nv_bfloat16*>(&shared.k.bytes[0][0] + Tile::offset(n / kSide, n % kSide)) = k[n];
  const int warp_row = threadIdx.x / 32 * sm90::kWarpRows;
  uint32_t fragment[kSide / 16][4];
  for (int step = 0; step < kSide / 16; ++step)
    for (int n = 0; n < 4; ++n) {
      const int row = warp_row + sm90::first_row_in_warp() + n % 2 * 8;
      const int column = step * 16 + n / 2 * 8 + sm90::first_column_in_eight();
      fragment[step][n] = *reinterpret_cast<const uint32_t*>(ds + row * kSide + column);
    }
  sm90::store_to_tile(shared.ds, warp_row, 0, fragment);
  ptx::proxy_fence();
  ptx::named_barrier_sync<1, kThreads>();
  float dq[kSide / 2];
  ptx::wgmma_fence();
  sm90::start_dq<__nv_bfloat16, kSide / 16>(sm90::along_rows<Tile>(ptx::shared_address(&shared.ds)),
                                            sm90::along_rows<Tile>(ptx::shared_address(&shared.k)), dq);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(dq);
  sm90::store_sums(shared.sums, dq);
  ptx::proxy_fence();
  ptx::named_barrier_sync<1, kThreads>();
  if (threadIdx.x == 0) {
    ptx::bulk_add(sums, &shared.sums[0][0][0], kSide * kSide);
    ptx::bulk_commit();
    ptx::bulk_wait_read();
  }
}

std::string dq_of_one_tile() {
  std::vector<__nv_bfloat16> ds(kSide * kSide), k(kSide * kSide);
  std::vector<float> expected(kSide * kSide), by_rows(kSide * kSide);
  for (int n = 0; n < kSide * kSide; ++n) {
    ds[n] = __nv_bfloat16(static_cast<float>(ds_value(n / kSide, n % kSide)));
    k[n] = __nv_bfloat16(static_cast<float>(k_value(n / kSide, n % kSide)));
    for (int key = 0; key < kSide; ++key)
      expected[n] += kBlocks * ds_value(key, n / kSide) * k_value(key, n % kSide);
  }
  const Buffer<__nv_bfloat16> on_ds(ds), on_k(k);
  const Buffer<float> sums(std::vector<float>(kSide * kSide, 0.0f));
  check(cudaFuncSetAttribute(dq_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  dq_kernel<<<kBlocks, kThreads, sizeof(Shared)>>>(on_ds.get(), on_k.get(), sums.get());
  finish();
  const std::vector<float> got = sums.values();
  for (int n = 0; n < kSide * kSide; ++n) {
    const int four = n / 4 / kThreads, thread = n / 4 % kThreads, e = n % 4;
    const int row = thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8,
              column = 8 * four + thread % 4 * 2 + e % 2;
    by_rows[row * kSide + column] = got[n];
  }
  return first_difference(by_rows, expected, kSide);
}

constexpr int kTurns = 64, kSums = 1024;
constexpr float kLarge = 1 << 24;  // + 1 is itself again

// The first block adds kLarge, all other blocks add 1. In any other order more than kLarge is left.
__global__ void __launch_bounds__(kThreads) turns_kernel(float* sums, int32_t* ticket_and_turns) {
  __shared__ alignas(16) float terms[kSums];
  __shared__ int turn;
  if (threadIdx.x == 0) turn = ptx::draw_ticket(ticket_and_turns);
  __syncthreads();
  for (int n = threadIdx.x; n < kSums; n += kThreads) terms[n] = turn == 0 ? kLarge : 1.0f;
  ptx::proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (turn == 0) __nanosleep(100000);  // everybody else is there before
    ptx::acquire_bulk_turn(ticket_and_turns + 1, turn);
    ptx::bulk_add(sums, terms, kSums);
    ptx::bulk_commit();
    ptx::bulk_wait();
    ptx::release_bulk_turn(ticket_and_turns + 1);
  }
}

std::string additions_in_turns() {
  const Buffer<float> sums(std::vector<float>(kSums, 0.0f));
  const Buffer<int32_t> ticket_and_turns(std::vector<int32_t>(2, 0));
  turns_kernel<<<kTurns, kThreads>>>(sums.get(), ticket_and_turns.get());
  finish();
  return first_difference(sums.values(), std::vector<float>(kSums, kLarge), kSums);
}

}  // namespace

std::vector<Unit> backward_units() {
  return {
      {"dQ = dS K by stmatrix, wgmma and bulk additions, as the sm90 backward does it", dq_of_one_tile},
      {"bulk additions of 64 blocks, each in its turn", additions_in_turns},
  };
}

}  // namespace gpu_units
