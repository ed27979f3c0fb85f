// mbarriers, TMA and wgmma as the PTX manual defines them, against the kernel where it leaves a choice:
//   - A copy by TMA lands when all threads wait, in random order. From its start on the target holds NaN, and
//   touching
//     it is an error. So is starting one where a wgmma may still read, or without the barriers' fence.
//   - A wgmma reads its operands, registers too, and writes its accumulators when all threads of the
//   warpgroup wait for
//     it. From its start on the accumulators hold NaN. What it reads from shared memory must have landed, and
//     each thread must have known so at the start.
#pragma GCC optimize("O3")

#include "hopper.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "fibers.h"
#include "include/hopper_on_host.h"
#include "memory.h"

namespace flash_attn_ext::cuda {
extern unsigned char shared_bytes[];
}

namespace cuda_host {
namespace {

constexpr int kWarpgroup = 128, kWarp = 32, kRows = 64, kDepth = 16;

unsigned char* shared_begin() { return flash_attn_ext::cuda::shared_bytes; }

struct Bytes {
  uintptr_t begin, end;

  bool overlaps(const Bytes& other) const { return begin < other.end && other.begin < end; }
  bool operator<(const Bytes& other) const { return begin < other.begin; }
};

struct Barrier {
  int writer;  // as which its copies write to memory
  int init_thread;
  uint32_t init_time, fence_time;  // fence_time 0: TMA does not see the barrier
  uint32_t expected, pending;
  int64_t bytes_expected = 0;
  uint32_t phase = 0;
  uint32_t copies = 0;
  Clock arriving, completed;
  std::vector<Fiber*> waiting;
  std::vector<std::array<std::shared_ptr<const Clock>, 2>> joined;  // what a clock becomes by waiting
};

struct Copy {
  Bytes target;
  const CUtensorMap* map;
  std::array<int32_t, CUtensorMap::kRank> corner;
  Barrier* barrier;
};

struct PendingProduct {
  Product product;
  int group;
  std::shared_ptr<const Clock> known;  // when it started
};

struct Thread {
  bool fenced = false;
  int groups = 0;
  std::vector<PendingProduct> products;
  std::map<float*, std::vector<float>> accumulators;  // what was in those that are in flight
};

// A part of shared memory that a warpgroup's products have read, and when each thread learned that they had.
struct Read {
  Bytes bytes;
  int first_thread;
  std::array<uint32_t, kWarpgroup> times;
};

struct Block {
  std::map<const uint64_t*, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<Thread> threads;
  std::vector<Read> reads;
};

Block block;
int compute_capability[2] = {8, 0};

std::string who() { return describe(current->thread); }
std::string text(Site site) { return std::string(site.what) + " at line " + std::to_string(site.line); }

// ---- mbarriers

Barrier& find(uint64_t* address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end() || !current->knows(found->second.init_thread, found->second.init_time))
    fail("mbarrier used before its initialisation is known: " + who());
  return found->second;
}

void join(Clock& into, const Clock& other) {
  for (size_t n = 0; n < into.size(); ++n) into[n] = std::max(into[n], other[n]);
}

void complete_if_done(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes_expected != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.completed = barrier.arriving;
  barrier.joined.clear();
  for (Fiber* fiber : barrier.waiting) wake(fiber);
  barrier.waiting.clear();
  shuffle_warps();
}

// ---- TMA

template <class Function>  // (row of the box, its address in the tensor or null)
void for_each_row(const Copy& copy, const Function& function) {
  const CUtensorMap& map = *copy.map;
  uint32_t row = 0;
  for (uint32_t n3 = 0; n3 < map.box[3]; ++n3)
    for (uint32_t n2 = 0; n2 < map.box[2]; ++n2)
      for (uint32_t n1 = 0; n1 < map.box[1]; ++n1, ++row) {
        const int64_t at[] = {copy.corner[1] + n1, copy.corner[2] + n2, copy.corner[3] + n3};
        const unsigned char* source = map.data + 2 * copy.corner[0];
        for (int n = 0; n < 3 && source; ++n) {
          const bool inside = 0 <= at[n] && at[n] < static_cast<int64_t>(map.size[n + 1]);
          source = inside ? source + at[n] * static_cast<int64_t>(map.stride[n]) : nullptr;
        }
        function(row, source);
      }
}

// The 128-byte swizzle is one of address bits.
uintptr_t swizzled(uintptr_t address) {
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(shared_begin());
  return reinterpret_cast<uintptr_t>(shared_begin()) + (offset ^ (offset >> 7 & 7) << 4);
}

// ---- wgmma

struct Matrix {
  uintptr_t start;
  uint32_t leading, stride;

  explicit Matrix(uint64_t descriptor)
      : start(reinterpret_cast<uintptr_t>(shared_begin()) + (descriptor & 0x3fff) * 16),
        leading((descriptor >> 16 & 0x3fff) * 16),
        stride((descriptor >> 32 & 0x3fff) * 16) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      fail("wgmma takes only the 128-byte swizzle, from a multiple of 1024 bytes on: " + who());
  }

  // Contiguous along k (for 16 of it), or along the rows, in panels of 64.
  uint16_t along_k(int row, int k) const { return at(row / 8 * stride + row % 8 * 128 + k * 2); }
  uint16_t along_rows(int row, int k) const {
    return at(row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2);
  }
  // Whole rows of 128 bytes.
  std::vector<Bytes> bytes_along_k(int rows) const {
    std::vector<Bytes> result;
    for (int row = 0; row < rows; row += 8) {
      const uintptr_t group = start / 128 * 128 + row / 8 * stride;
      if (!result.empty() && result.back().end == group) {
        result.back().end += 1024;
      } else {
        result.push_back({group, group + 1024});
      }
    }
    return result;
  }
  std::vector<Bytes> bytes_along_rows(int rows) const {
    std::vector<Bytes> result;
    for (int panel = 0; panel < rows / 64; ++panel)
      for (int group = 0; group < kDepth / 8; ++group) {
        const uintptr_t begin = start + panel * leading + group * stride;
        result.push_back({begin, begin + 1024});
      }
    return result;
  }

 private:
  uint16_t at(uintptr_t offset) const {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const void*>(swizzled(start + offset)), sizeof(bits));
    return bits;
  }
};

std::vector<Bytes> bytes_read(const Product& product) {
  std::vector<Bytes> result;
  if (product.a_registers) {
    result = Matrix(product.b).bytes_along_rows(product.columns);
  } else {
    result = Matrix(product.b).bytes_along_k(product.columns);
    for (const Bytes& bytes : Matrix(product.a).bytes_along_k(kRows)) result.push_back(bytes);
  }
  return result;
}

// Element e of a thread's n-th four in an accumulator, or of its pairs in A.
int row_of(int thread, int e) { return thread / kWarp * 16 + thread % kWarp / 4 + e / 2 * 8; }
int column_of(int thread, int n, int e) { return 8 * n + thread % 4 * 2 + e % 2; }

// c += a b, c 64 x columns.
void multiply(const std::vector<const Product*>& products, std::vector<float>& c) {
  const Product& first = *products[0];
  const int columns = first.columns;
  float a[kRows][kDepth];
  std::vector<float> b(kDepth * columns);
  if (first.a_registers) {
    for (int t = 0; t < kWarpgroup; ++t)
      for (int n = 0; n < 4; ++n)
        for (int e = 0; e < 2; ++e)
          a[row_of(t, n % 2 * 2)][column_of(t, n / 2, e)] =
              first.widen(static_cast<uint16_t>(products[t]->a_registers[n] >> 16 * e));
  } else {
    const Matrix matrix(first.a);
    for (int row = 0; row < kRows; ++row)
      for (int k = 0; k < kDepth; ++k) a[row][k] = first.widen(matrix.along_k(row, k));
  }
  const Matrix matrix(first.b);
  for (int column = 0; column < columns; ++column)
    for (int k = 0; k < kDepth; ++k)
      b[k * columns + column] =
          first.widen(first.a_registers ? matrix.along_rows(column, k) : matrix.along_k(column, k));
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[row][k];
      for (int column = 0; column < columns; ++column)
        c[row * columns + column] += factor * b[k * columns + column];
    }
}

// What the products of all threads read has landed, and they knew it when they started.
void check_operands(const std::vector<const PendingProduct*>& products, const Bytes& bytes) {
  for_each_last_write(bytes.begin, bytes.end - bytes.begin, [&](const LastWrite& last) {
    if (!last.written) fail("wgmma reads memory that nobody wrote: " + who());
    if (!last.landed) fail("wgmma reads what has not landed: " + who());
    if (last.writer < static_cast<int>(block.threads.size()))
      fail("wgmma reads what a thread wrote, which takes a proxy fence: " + who());
    for (const PendingProduct* product : products)
      if ((*product->known)[last.writer] < last.time)
        fail("race: wgmma reads what its thread has not waited for: " + who());
  });
}

void finish_products(const std::vector<Fiber*>& fibers, int pending) {
  const int first_thread = fibers[0]->thread / kWarpgroup * kWarpgroup;
  Thread* threads = &block.threads[first_thread];
  std::map<float*, std::vector<float>> results;  // by the first thread's accumulator
  std::set<Bytes> read;
  size_t done = 0;
  for (; done < threads[0].products.size(); ++done) {
    if (threads[0].products[done].group >= threads[0].groups - pending) break;
    std::vector<const PendingProduct*> pending_products;
    std::vector<const Product*> products;
    for (int t = 0; t < kWarpgroup; ++t) {
      if (threads[t].products.size() != threads[0].products.size() || threads[t].groups != threads[0].groups)
        fail("the threads of a warpgroup differ in what they started: " + describe(first_thread + t));
      pending_products.push_back(&threads[t].products[done]);
      products.push_back(&threads[t].products[done].product);
      if (products[t]->a != products[0]->a || products[t]->b != products[0]->b)
        fail("the threads of a warpgroup differ in their descriptors: " + describe(first_thread + t));
    }
    for (const Bytes& bytes : bytes_read(*products[0]))
      if (read.insert(bytes).second) check_operands(pending_products, bytes);
    const int columns = products[0]->columns;
    std::vector<float>& result = results[products[0]->d];
    const bool starts = result.empty();
    if (starts || !products[0]->accumulate) result.assign(kRows * columns, 0);
    if (starts && products[0]->accumulate)
      for (int t = 0; t < kWarpgroup; ++t)
        for (int n = 0; n < columns / 2; ++n)
          result[row_of(t, n % 4) * columns + column_of(t, n / 4, n % 4)] =
              threads[t].accumulators.at(products[t]->d)[n];
    multiply(products, result);
  }
  for (int t = 0; t < kWarpgroup; ++t) {
    auto& products = threads[t].products;
    for (size_t n = 0; n < done; ++n) {
      const auto result = results.find(threads[0].products[n].product.d);
      const Product& product = products[n].product;
      if (threads[t].accumulators.erase(product.d) == 0) continue;  // written already
      for (int e = 0; e < product.columns / 2; ++e)
        product.d[e] = result->second[row_of(t, e % 4) * product.columns + column_of(t, e / 4, e % 4)];
    }
  }
  for (int t = 0; t < kWarpgroup; ++t) {
    auto& products = threads[t].products;
    products.erase(products.begin(), products.begin() + done);
    threads[t].fenced = false;
    for (const PendingProduct& left : products)
      if (threads[t].accumulators.count(left.product.d) == 0)
        fail("an accumulator of wgmma is in batches before and after a wait: " + describe(first_thread + t));
  }
  for (const Bytes& bytes : read) {
    const auto found = std::find_if(block.reads.begin(), block.reads.end(), [&](const Read& r) {
      return r.first_thread == first_thread && r.bytes.begin == bytes.begin && r.bytes.end == bytes.end;
    });
    Read& entry = found == block.reads.end() ? block.reads.emplace_back() : *found;
    entry.bytes = bytes;
    entry.first_thread = first_thread;
    for (const Fiber* fiber : fibers) entry.times[fiber->thread % kWarpgroup] = fiber->now;
  }
}

// Before TMA writes there: the products that read it are done, and the current thread knows of at least one
// lane of each of their warps that it was.
void check_not_read(const Bytes& target) {
  for (const Thread& thread : block.threads)
    for (const PendingProduct& product : thread.products)
      for (const Bytes& bytes : bytes_read(product.product))
        if (bytes.overlaps(target)) fail("TMA overwrites what a wgmma still reads: " + who());
  for (const Read& read : block.reads) {
    if (!read.bytes.overlaps(target)) continue;
    for (int warp = 0; warp < kWarpgroup; warp += kWarp) {
      bool known = false;
      for (int t = warp; t < warp + kWarp; ++t) known |= current->knows(read.first_thread + t, read.times[t]);
      if (!known) fail("race: TMA overwrites what a wgmma has read, with no barrier in between: " + who());
    }
  }
}

}  // namespace

void hopper_begin_block(int threads) {
  block = {};
  block.threads.resize(threads);
}

std::string hopper_end_block() {
  if (!block.copies.empty()) return "the block ended before a copy by TMA had landed";
  for (const Thread& thread : block.threads)
    if (!thread.products.empty()) return "the block ended before a wgmma was waited for";
  return "";
}

bool hopper_land_one() {
  if (block.copies.empty()) return false;
  std::swap(block.copies[random_below(block.copies.size())], block.copies.back());
  const Copy copy = block.copies.back();
  block.copies.pop_back();
  const int64_t first = copy.corner[0], columns = copy.map->box[0];
  for_each_row(copy, [&](uint32_t row, const unsigned char* source) {
    for (int64_t column = 0; column < columns; ++column) {
      auto* target = reinterpret_cast<void*>(swizzled(copy.target.begin + row * 128 + column * 2));
      const bool inside = source && first + column < static_cast<int64_t>(copy.map->size[0]);
      if (inside) {
        std::memcpy(target, source + column * 2, 2);
      } else {
        std::memset(target, 0, 2);
      }
    }
  });
  Barrier& barrier = *copy.barrier;
  const size_t bytes = copy.target.end - copy.target.begin;
  set_last_write(copy.target.begin, bytes, {true, true, barrier.writer, ++barrier.copies});
  barrier.arriving[barrier.writer] = barrier.copies;
  barrier.bytes_expected -= bytes;
  complete_if_done(barrier);
  return true;
}

void barrier_init(uint64_t* address, uint32_t arrivals) {
  if (block.barriers.size() == kMaxAsyncWriters) fail("more mbarriers than kMaxAsyncWriters");
  Barrier barrier;
  barrier.writer = static_cast<int>(block.threads.size() + block.barriers.size());
  barrier.init_thread = current->thread;
  barrier.init_time = current->now;
  barrier.fence_time = 0;
  barrier.expected = barrier.pending = arrivals;
  barrier.arriving = barrier.completed = Clock(current->known->size(), 0);
  block.barriers[address] = barrier;
}

void barrier_init_fence() {
  for (auto& [address, barrier] : block.barriers)
    if (barrier.init_thread == current->thread) barrier.fence_time = current->now;
}

void barrier_arrive(uint64_t* address, uint32_t bytes) {
  Barrier& barrier = find(address);
  if (barrier.pending == 0) fail("too many arrivals at an mbarrier: " + who());
  barrier.bytes_expected += bytes;
  --barrier.pending;
  join(barrier.arriving, *current->known);
  barrier.arriving[current->thread] = current->now++;
  complete_if_done(barrier);
}

void barrier_wait(Site site, uint64_t* address, uint32_t parity) {
  Barrier& barrier = find(address);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(current);
    wait_to_be_woken(site);
  }
  for (const auto& [before, after] : barrier.joined)
    if (before == current->known) {
      current->known = after;
      return;
    }
  const auto after = std::make_shared<Clock>(*current->known);
  join(*after, barrier.completed);
  barrier.joined.push_back({current->known, after});
  current->known = after;
}

void load_box(Site site, void* shared, const CUtensorMap* map, const int32_t* corner, uint64_t* address) {
  Barrier& barrier = find(address);
  if (barrier.fence_time == 0 || !current->knows(barrier.init_thread, barrier.fence_time))
    fail("TMA does not see an mbarrier, for want of a fence: " + text(site) + ", " + who());
  Copy copy;
  copy.map = map;
  copy.barrier = &barrier;
  for (int n = 0; n < CUtensorMap::kRank; ++n) copy.corner[n] = corner[n];
  const size_t bytes = size_t{map->box[0]} * map->box[1] * map->box[2] * map->box[3] * 2;
  const auto target = reinterpret_cast<uintptr_t>(shared);
  copy.target = {target, target + bytes};
  if (target % 128 != 0 || map->box[0] * 2 != 128)
    fail("TMA: a box of 128-byte rows, at a multiple of 128 bytes");

  check_not_read(copy.target);
  for_each_last_write(target, bytes, [&](const LastWrite& last) {
    if (last.written && !last.landed) fail("TMA writes where another copy has not landed: " + text(site));
    if (last.written && !current->knows(last.writer, last.time))
      fail("race: TMA overwrites what was written with no barrier in between: " + text(site) + ", " + who());
  });
  for_each_row(copy, [&](uint32_t, const unsigned char* source) {
    const int64_t left = static_cast<int64_t>(map->size[0]) - corner[0];
    if (source && left > 0)
      for (int64_t n = 0; n < std::min<int64_t>(left, map->box[0]); n += 8)
        check_global_read(source + 2 * n, 16, __builtin_return_address(0));
  });
  std::memset(shared, 0xff, bytes);
  set_last_write(target, bytes, {true, false, barrier.writer, 0});
  block.copies.push_back(copy);
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_begin());
}

void wgmma_fence() { block.threads[current->thread].fenced = true; }

void wgmma(Site site, const Product& product) {
  Thread& self = block.threads[current->thread];
  if (!self.fenced) fail("wgmma without a fence at the start of its batch: " + text(site) + ", " + who());
  const int count = product.columns / 2;
  if (self.accumulators.count(product.d) == 0) {
    self.accumulators[product.d].assign(product.d, product.d + count);
    std::fill(product.d, product.d + count, NAN);
  }
  self.products.push_back({product, self.groups, current->known});
}

// A batch takes its own fence: ptxas puts one in where it is missing, and says so (C7519).
void wgmma_commit() {
  ++block.threads[current->thread].groups;
  block.threads[current->thread].fenced = false;
}

void wgmma_wait(Site site, int pending) {
  meet_warpgroup(site, [pending](const std::vector<Fiber*>& fibers) { finish_products(fibers, pending); });
}

}  // namespace cuda_host

// ---- what the launch side asks for

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                                const cuuint32_t* element_stride, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  bool valid = rank == CUtensorMap::kRank && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
               swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * 2 <= 128;
  map->data = static_cast<const unsigned char*>(data);
  for (int n = 0; n < CUtensorMap::kRank; ++n) {
    map->size[n] = size[n];
    map->box[n] = box[n];
    valid = valid && size[n] > 0 && size[n] <= uint64_t{1} << 32 && box[n] > 0 && box[n] <= 256 &&
            element_stride[n] == 1;
  }
  for (int n = 0; n < CUtensorMap::kRank - 1; ++n) {
    map->stride[n] = stride[n];
    valid = valid && stride[n] > 0 && stride[n] % 16 == 0 && stride[n] < uint64_t{1} << 40;
  }
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  const bool found = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = found ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = cuda_host::compute_capability[attribute == cudaDevAttrComputeCapabilityMinor];
  return cudaSuccess;
}

extern "C" void set_compute_capability(int major, int minor) {
  cuda_host::compute_capability[0] = major;
  cuda_host::compute_capability[1] = minor;
}
