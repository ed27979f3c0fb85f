// The state of the running block that the files hopper_*.cpp share.
#pragma once

#include <algorithm>
#include <array>
#include <map>

#include "fibers.h"
#include "hopper.h"
#include "include/hopper_on_host.h"
#include "memory.h"

namespace flash_attn_ext::cuda {
extern unsigned char shared_bytes[];
}

namespace cuda_host {

constexpr int kWarpgroup = 128, kWarp = 32;

struct Bytes {
  uintptr_t begin, end;

  bool overlaps(const Bytes& other) const { return begin < other.end && other.begin < end; }
  bool operator<(const Bytes& other) const {
    return begin != other.begin ? begin < other.begin : end < other.end;
  }
};

struct Barrier {
  int writer;  // the entry of the clocks for the writes of its copies
  int init_thread;
  uint32_t init_time, fence_time;  // fence_time 0: TMA does not see the barrier
  uint32_t expected, pending;
  int64_t bytes_expected = 0;
  uint32_t phase = 0;
  bool waited = true;  // a thread has waited for the last phase
  uint32_t copies = 0;
  Clock arriving, completed;
  std::vector<Fiber*> waiting;
  std::vector<std::array<std::shared_ptr<const Clock>, 2>> joined;  // the clock of a thread after its wait
};

// To shared memory.
struct Copy {
  Bytes target;
  Barrier* barrier;
  std::function<void()> land;
};

// From shared to global memory: a bulk addition, or a store by TMA.
struct BulkStore {
  int thread, group;
  Bytes source;
  std::function<void(const unsigned char* read)> land;  // read: the bytes of the source
  bool has_read = false;
  std::vector<unsigned char> read;
};

// The start of an asynchronous operation by a thread: the thread's clock and its time.
struct Start {
  int thread;
  uint32_t now;
  std::shared_ptr<const Clock> known;
};

struct PendingProduct {
  Product product;
  int group;
  Start start;
};

struct Thread {
  bool fenced = false;
  int groups = 0, bulk_groups = 0;
  std::vector<uint32_t> proxy_fences;  // when
  std::vector<PendingProduct> products;
  std::map<float*, std::vector<float>> accumulators;  // the earlier values of accumulators in flight
};

// A range of shared memory that an asynchronous operation has read, and the time of each thread's wait for the
// operation. The threads of a warpgroup wait for a product, one thread waits for a bulk copy.
struct Read {
  Bytes bytes;
  int first_thread;
  std::vector<uint32_t> times;
};

// Of a thread, by warpgroup.
struct Registers {
  std::vector<int> held;
  std::vector<int> free;  // in the pool of each block
  std::vector<Fiber*> waiting;
};

// An arrival at a barrier of another block of the cluster.
struct RemoteArrival {
  int thread, rank;  // rank: of the other block
  uint32_t time;
};

// A block, or all blocks of a cluster.
struct Block {
  std::map<const uint64_t*, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<BulkStore> stores;
  std::vector<Thread> threads;
  std::vector<Read> reads;
  std::vector<std::vector<size_t>> reads_of_page;  // for each KiB of shared memory the reads that overlap it
  Registers registers;
  std::vector<RemoteArrival> remote_arrivals;
  bool multicasts = false;
};

extern Block block;

inline unsigned char* shared_begin() { return flash_attn_ext::cuda::shared_bytes; }
inline std::string who() { return describe(current->thread); }
inline std::string text(Site site) {
  return std::string(site.what) + " at line " + std::to_string(site.line);
}

// For a copy that is about to start.
Barrier& find_barrier(uint64_t* address);
bool complete_if_done(Barrier& barrier);  // returns true if a thread waited for this phase

// An asynchronous operation reads `bytes`. Checks two conditions for each of `starts`. The copies to `bytes` have
// landed. Each thread that wrote to `bytes` has made a proxy fence after its write.
void check_readable(const char* reader, const Bytes& bytes, const std::vector<const Start*>& starts);
// The operation has read the bytes. `fibers`, from first_thread on, now know it.
void remember_read(const Bytes& bytes, int first_thread, const std::vector<Fiber*>& fibers);
// Before a write to the bytes: checks that the current thread knows of the end of each operation that read them.
void check_not_read(const char* writer, const Bytes& target);
// The same check for products that have not ended.
void check_no_product_reads(const char* writer, const Bytes& target);
void land_stores(int thread, int group_end);
void begin_registers(int threads, int ranks);

inline int own_rank() { return rank_of(current->thread); }
// The same place in the shared memory of another block of the cluster.
template <class T>
T* in_rank(T* shared, int rank) {
  const auto address = reinterpret_cast<uintptr_t>(shared);
  const auto from = reinterpret_cast<uintptr_t>(shared_of_rank(rank_of_address(address)));
  return reinterpret_cast<T*>(address - from + reinterpret_cast<uintptr_t>(shared_of_rank(rank)));
}

}  // namespace cuda_host
