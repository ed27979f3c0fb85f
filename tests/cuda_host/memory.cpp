// The kernels are compiled with -fsanitize=thread, which inserts a call before each access to memory. This file defines the
// called functions. ThreadSanitizer's own library knows neither shared memory nor warps.
//
// Each element has its last writer and the time of the write. An access is one of these errors:
//   - out of bounds: outside of the registered buffers, or a write to a buffer that is only for reading;
//   - uninitialised: a read of an element that nothing has written, in a buffer that was not initialised;
//   - a race: the last writer is another thread with no barrier in between, or another block of the same launch.
// Reads are not recorded. A missing barrier between a read and a later write shows if the writer's warp runs before the
// reader's warp. So fibers.cpp lets each warp once run ahead of the other warps, as far as it can.
#include "memory.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "fibers.h"
#include "hopper.h"

namespace flash_attn_ext::cuda {
// The array of csrc/cuda/shared_memory.h.
alignas(1024) unsigned char shared_bytes[cuda_host::kMaxSharedBytes * cuda_host::kMostRanks];
}  // namespace flash_attn_ext::cuda

namespace cuda_host {
namespace {

struct Write {
  uint32_t block;  // number of the block since the program began; 0: never written
  uint32_t time : 22, thread : 10;

  bool operator==(const Write& other) const { return std::memcmp(this, &other, sizeof(Write)) == 0; }
};

constexpr uint32_t kInFlight = (1 << 22) - 1;  // the time of a write in flight
constexpr uint32_t kAtomic =
    (1 << 22) - 2;  // the time of a write that atomic writes of other blocks may follow

struct Region {
  uintptr_t begin, end;
  std::string name;
  bool writable, initialised, shared;
  int element_shift;  // log2 of an element's bytes. A shift, because a division here would take most of the run's time
  std::vector<Write> last_writes;  // one per element

  bool contains(uintptr_t address) const { return begin <= address && address < end; }
  Write* last_write(uintptr_t address) { return &last_writes[(address - begin) >> element_shift]; }
  size_t elements(size_t bytes) const { return (bytes + (size_t{1} << element_shift) - 1) >> element_shift; }
};

constexpr int kSharedElementShift = 1;  // the smallest elements in shared memory have 2 bytes

struct Memory {
  std::vector<Region> regions;  // the first is the shared memory of the block that runs
  Region others[kMostRanks];    // the shared memory of the other blocks of the cluster, by rank
  int rank = 0, ranks = 1;
  Region* last_found;
  uintptr_t arguments_begin, arguments_end;
  uint32_t first_block_of_launch = 1, blocks_begun = 1, block = 1;
  bool ordered_adds = false;
  std::map<int, uint32_t> adds;     // the time of the last addition of each thread of this block
  std::set<uint32_t> known_blocks;  // the blocks that this block has waited for
  std::map<const void*, std::set<uint32_t>>
      told_blocks;  // by address: the blocks that a waiting block learns of

  Memory() { begin_regions(); }

  void begin_regions() {
    regions.clear();
    const auto shared = reinterpret_cast<uintptr_t>(flash_attn_ext::cuda::shared_bytes);
    const Region empty{shared, shared, "shared memory", true, false, true, kSharedElementShift, {}};
    regions.push_back(empty);
    regions[0].last_writes.resize(kMaxSharedBytes >> kSharedElementShift);
    std::fill_n(others, kMostRanks, empty);
    rank = 0, ranks = 1;
    last_found = &regions[0];
  }

  // Shared memory and the region of the last access. Null: the address is elsewhere.
  Region* find_quickly(uintptr_t address) {
    if (regions[0].contains(address)) return &regions[0];
    return last_found->contains(address) ? last_found : nullptr;
  }

  Region& shared_of(int of) { return of == rank ? regions[0] : others[of]; }

  Region* find(uintptr_t address) {
    if (Region* region = find_quickly(address)) return region;
    for (Region& region : regions)
      if (region.contains(address)) return last_found = &region;
    return nullptr;
  }
};

Memory memory;

struct Access {
  uintptr_t address;
  size_t bytes;
  bool is_write;
  void* code;
};

// "<kernel, block, thread> reads 4 bytes at +12 of q [code 0x1234]": addr2line converts the code address to a line.
std::string describe(const Access& access, const Region* region) {
  Dl_info info;
  char text[160];
  const uintptr_t base = dladdr(access.code, &info) ? reinterpret_cast<uintptr_t>(info.dli_fbase) : 0;
  std::snprintf(text, sizeof(text), " %s %zu bytes at +%zu of %s [code 0x%zx]",
                access.is_write ? "writes" : "reads", access.bytes,
                region ? access.address - region->begin : 0, region ? region->name.c_str() : "unknown memory",
                reinterpret_cast<uintptr_t>(access.code) - base - 1);
  return cuda_host::describe(current->thread) + text;
}

// A quick test whether an access may follow a write. If it fails, check_order() finds the error, if there is one.
inline bool is_plainly_ordered(const Region& region, const Write& last) {
  if (last.block == memory.block) return last.time < kAtomic && current->knows(last.thread, last.time);
  return last.block < memory.first_block_of_launch && region.initialised;
}

[[gnu::noinline]] void check_order(const Access& access, const Region& region, const Write& last) {
  if (last.block < memory.first_block_of_launch || (region.shared && last.block != memory.block)) {
    const bool unwritten = region.shared || (last.block == 0 && !region.initialised);
    if (unwritten && !access.is_write) fail("read of memory that nobody wrote: " + describe(access, &region));
  } else if (last.time == kAtomic) {
    fail("race: " + describe(access, &region) + ", which blocks of this launch change atomically");
  } else if (last.block != memory.block) {
    fail("race between blocks: " + describe(access, &region) + ", which another block of this launch wrote");
  } else if (last.time == kInFlight) {
    fail("touched in flight: " + describe(access, &region) + ", where a copy of thread " +
         std::to_string(last.thread) + " has not landed");
  } else if (!current->knows(last.thread, last.time)) {
    fail("race: " + describe(access, &region) + ", which thread " + std::to_string(last.thread) +
         " wrote with no barrier in between");
  }
}

// The kernel's arguments and the built-in variables.
bool is_launch_state(uintptr_t address) {
  for (const dim3* variable : {&threadIdx, &blockIdx, &blockDim, &gridDim}) {
    const auto begin = reinterpret_cast<uintptr_t>(variable);
    if (begin <= address && address < begin + sizeof(dim3)) return true;
  }
  return memory.arguments_begin <= address && address < memory.arguments_end;
}

[[gnu::noinline]] void fail_out_of_bounds(const Access& access, const Region* region) {
  fail("out of bounds: " + describe(access, region));
}

[[gnu::noinline]] void fail_misaligned(const Access& access, const Region& region) {
  fail("misaligned: " + describe(access, &region));
}

// Whether the access needs no check: the host's own code runs, or the address is in the fiber's own stack.
[[gnu::always_inline]] inline bool is_unchecked(uintptr_t address) {
  return !current || address - reinterpret_cast<uintptr_t>(current->stack.get()) < kStackBytes;
}

// Checks an access. Inlined where the number of bytes is a constant: a large part of a run's time is spent here. Kernels
// read threadIdx often, so is_launch_state() comes before the search in all buffers.
[[gnu::always_inline]] inline void check_access(const Access& access) {
  Region* region = memory.find_quickly(access.address);
  if (!region && !access.is_write && is_launch_state(access.address)) return;
  if (!region) region = memory.find(access.address);
  if (!region) return fail_out_of_bounds(access, nullptr);
  if (access.address + access.bytes > region->end || (access.is_write && !region->writable))
    return fail_out_of_bounds(access, region);
  const bool is_copy = (access.bytes & (access.bytes - 1)) != 0;  // of a struct
  if (!is_copy && (access.address & (access.bytes - 1)) != 0) return fail_misaligned(access, *region);
  Write* last = region->last_write(access.address);
  const size_t elements = region->elements(access.bytes);
  for (size_t n = 0; n < elements; ++n)
    if ((n == 0 || !(last[n] == last[n - 1])) && !is_plainly_ordered(*region, last[n]))
      check_order(access, *region, last[n]);
  if (!access.is_write) return;
  if (region->shared) hopper_check_write(reinterpret_cast<const void*>(access.address), access.bytes);
  const Write mine{memory.block, current->now, static_cast<uint32_t>(current->thread)};
  for (size_t n = 0; n < elements; ++n) last[n] = mine;
}

// Not inlined: most accesses need no check, and their hooks then save no registers.
template <size_t kBytes, bool kIsWrite>
[[gnu::noinline]] void check_access(uintptr_t address, void* code) {
  check_access({address, kBytes, kIsWrite, code});
}

inline void look_at(const Access& access) {
  if (!is_unchecked(access.address)) check_access(access);
}

void set_writer(void* address, size_t bytes, uint32_t time) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  Region* region = memory.find(begin);
  Write* first = region->last_write(begin);
  std::fill(first, first + region->elements(bytes),
            Write{memory.block, time, static_cast<uint32_t>(current->thread)});
}

// Several blocks of one launch may change some elements. Calls visit(last write) for each of these elements.
template <class Visit>
void change_atomically(const Access& access, const Visit& visit) {
  Region* region = memory.find(access.address);
  if (!region || region->shared || access.address + access.bytes > region->end || !region->writable)
    fail("out of bounds: " + describe(access, region));
  Write* last = region->last_write(access.address);
  const size_t elements = region->elements(access.bytes);
  for (size_t n = 0; n < elements; ++n) {
    if (n > 0 && last[n] == last[n - 1]) continue;
    if (last[n].time == kAtomic && last[n].block >= memory.first_block_of_launch) {
      visit(last[n]);
    } else {
      check_order({access.address, access.bytes, false, access.code}, *region, last[n]);
    }
  }
  std::fill(last, last + elements, Write{memory.block, kAtomic, static_cast<uint32_t>(current->thread)});
}

}  // namespace

void touch_atomically(const void* address, size_t bytes, void* code) {
  change_atomically({reinterpret_cast<uintptr_t>(address), bytes, true, code}, [](const Write&) {});
}

void add_to_global(float* sums, size_t bytes, void* code) {
  const Access access{reinterpret_cast<uintptr_t>(sums), bytes, true, code};
  change_atomically(access, [&](const Write& last) {
    if (memory.ordered_adds && last.block != memory.block && memory.known_blocks.count(last.block) == 0)
      fail("additions in no fixed order: " + describe(access, nullptr));
  });
  memory.adds[current->thread] = current->now;
}

void learn_blocks_of(const void* turns) {
  const std::set<uint32_t>& told = memory.told_blocks[turns];
  memory.known_blocks.insert(told.begin(), told.end());
}

void tell_blocks_of(const void* turns) {
  for (const auto& [thread, time] : memory.adds)
    if (!current->knows(thread, time))
      fail("a turn ends too early: " + describe(current->thread) + " does not know that thread " +
           std::to_string(thread) + " has added");
  std::set<uint32_t>& told = memory.told_blocks[turns];
  told.insert(memory.known_blocks.begin(), memory.known_blocks.end());
  told.insert(memory.block);
}

void touch(const void* address, size_t bytes, bool is_write, void* code) {
  look_at({reinterpret_cast<uintptr_t>(address), bytes, is_write, code});
}

void begin_flight(void* address, size_t bytes) { set_writer(address, bytes, kInFlight); }

void end_flight(void* address, size_t bytes) { set_writer(address, bytes, current->now); }
void for_each_last_write(uintptr_t address, size_t bytes,
                         const std::function<void(const LastWrite&)>& check) {
  const Region& shared = memory.shared_of(rank_of_address(address));
  if (address < shared.begin || address + bytes > shared.end)
    fail("out of bounds of shared memory: TMA or wgmma");
  const Write* last = &shared.last_writes[(address - shared.begin) >> kSharedElementShift];
  for (size_t n = 0; n < (bytes >> kSharedElementShift); ++n)
    if (n == 0 || !(last[n] == last[n - 1]))
      check({last[n].block == memory.block, last[n].time != kInFlight, static_cast<int>(last[n].thread),
             last[n].time});
}

void set_last_write(uintptr_t address, size_t bytes, const LastWrite& write) {
  Region& shared = memory.shared_of(rank_of_address(address));
  Write* first = &shared.last_writes[(address - shared.begin) >> kSharedElementShift];
  std::fill(first, first + (bytes >> kSharedElementShift),
            Write{memory.block, write.landed ? write.time : kInFlight, static_cast<uint32_t>(write.writer)});
}

void check_global_read(const void* address, size_t bytes, void* code) {
  look_at({reinterpret_cast<uintptr_t>(address), bytes, false, code});
}

void register_buffer(const void* data, int64_t bytes, int64_t element_bytes, const char* name, bool writable,
                     bool initialised) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  memory.regions.push_back({begin, begin + bytes, name, writable, initialised, false,
                            __builtin_ctzll(element_bytes), std::vector<Write>(bytes / element_bytes)});
  memory.last_found = &memory.regions[0];
}

bool set_buffer(void* data, int value, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  Region* region = memory.find(begin);
  if (!region || !region->writable || begin + bytes > region->end) return false;
  std::memset(data, value, bytes);
  Write* first = region->last_write(begin);
  std::fill(first, first + region->elements(bytes), Write{memory.block, 0, 0});
  return true;
}

void forget_buffers() { memory.begin_regions(); }

namespace {

// The state of a block that has begun and does not run now.
struct BlockMemory {
  uint32_t block;
  std::map<int, uint32_t> adds;
  std::set<uint32_t> known_blocks;
  std::vector<unsigned char> bytes;
  std::vector<Write> last_writes;
};

unsigned char* shared_begin() { return flash_attn_ext::cuda::shared_bytes; }

size_t bytes_of_rank = 0;  // from the shared memory of a block to that of the next block of its cluster

}  // namespace

std::shared_ptr<void> memory_leave_block() {
  Region& shared = memory.regions[0];
  const auto left = std::make_shared<BlockMemory>();
  left->block = memory.block;
  left->adds = std::move(memory.adds);
  left->known_blocks = std::move(memory.known_blocks);
  left->bytes.assign(shared_begin(), shared_begin() + (shared.end - shared.begin));
  left->last_writes.assign(shared.last_writes.begin(),
                           shared.last_writes.begin() + shared.elements(left->bytes.size()));
  return left;
}

void memory_enter_block(const std::shared_ptr<void>& left) {
  auto& back = *static_cast<BlockMemory*>(left.get());
  Region& shared = memory.regions[0];
  memory.block = back.block;
  memory.adds = std::move(back.adds);
  memory.known_blocks = std::move(back.known_blocks);
  shared.end = shared.begin + back.bytes.size();
  std::copy(back.bytes.begin(), back.bytes.end(), shared_begin());
  std::copy(back.last_writes.begin(), back.last_writes.end(), shared.last_writes.begin());
}

void memory_begin_launch(const void* arguments, size_t argument_bytes) {
  memory.first_block_of_launch = memory.blocks_begun + 1;
  memory.told_blocks.clear();
  memory.arguments_begin = reinterpret_cast<uintptr_t>(arguments);
  memory.arguments_end = memory.arguments_begin + argument_bytes;
}

void memory_begin_cluster(size_t shared_bytes, int ranks) {
  memory.block = ++memory.blocks_begun;
  memory.adds.clear();
  memory.known_blocks.clear();
  memory_enter_rank(0);
  memory.ranks = ranks;
  bytes_of_rank = (shared_bytes + 1023) / 1024 * 1024;
  for (int rank = 0; rank < ranks; ++rank) {
    Region& shared = memory.shared_of(rank);
    shared.begin = reinterpret_cast<uintptr_t>(shared_of_rank(rank));
    shared.end = shared.begin + shared_bytes;
    shared.last_writes.resize(kMaxSharedBytes >> kSharedElementShift);
    std::memset(shared_of_rank(rank), 0xff, shared_bytes);  // NaN in every float type
  }
}

void memory_enter_rank(int rank) {
  if (rank == memory.rank) return;
  std::swap(memory.regions[0], memory.others[memory.rank]);
  std::swap(memory.regions[0], memory.others[rank]);
  memory.rank = rank;
}

unsigned char* shared_of_rank(int rank) { return shared_begin() + rank * bytes_of_rank; }

int rank_of_address(uintptr_t address) {
  const auto offset = address - reinterpret_cast<uintptr_t>(shared_begin());
  if (memory.ranks == 1 || offset >= bytes_of_rank * memory.ranks) return memory.rank;
  return static_cast<int>(offset / bytes_of_rank);
}

}  // namespace cuda_host

extern "C" {

// Whether the additions of several blocks to an element must have a fixed order.
void require_ordered_adds(bool required) { cuda_host::memory.ordered_adds = required; }

void __tsan_init() {}

#define CUDA_HOST_HOOK(name, bytes, is_write)                                         \
  void __tsan_##name(void* p) {                                                       \
    const auto address = reinterpret_cast<uintptr_t>(p);                              \
    if (!cuda_host::is_unchecked(address))                                            \
      cuda_host::check_access<bytes, is_write>(address, __builtin_return_address(0)); \
  }
CUDA_HOST_HOOK(read1, 1, false)
CUDA_HOST_HOOK(read2, 2, false)
CUDA_HOST_HOOK(read4, 4, false)
CUDA_HOST_HOOK(read8, 8, false)
CUDA_HOST_HOOK(read16, 16, false)
CUDA_HOST_HOOK(write1, 1, true)
CUDA_HOST_HOOK(write2, 2, true)
CUDA_HOST_HOOK(write4, 4, true)
CUDA_HOST_HOOK(write8, 8, true)
CUDA_HOST_HOOK(write16, 16, true)

// Copies of whole structs.
void __tsan_read_range(void* p, size_t bytes) {
  cuda_host::look_at({reinterpret_cast<uintptr_t>(p), bytes, false, __builtin_return_address(0)});
}
void __tsan_write_range(void* p, size_t bytes) {
  cuda_host::look_at({reinterpret_cast<uintptr_t>(p), bytes, true, __builtin_return_address(0)});
}
}
