// mbarriers, named barriers and fences as the PTX manual defines them. Barriers have vector clocks: a thread that waits
// learns of all events that the arrived threads knew of.

#include <algorithm>
#include <utility>

#include "hopper_block.h"
#include "memory.h"

namespace cuda_host {

Block block;

namespace {

void join(Clock& into, const Clock& other) {
  for (size_t n = 0; n < into.size(); ++n) into[n] = std::max(into[n], other[n]);
}

}  // namespace

Barrier& find_barrier(uint64_t* address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end() || !current->knows(found->second.init_thread, found->second.init_time))
    fail("mbarrier used before its initialisation is known: " + who());
  return found->second;
}

bool complete_if_done(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes_expected != 0) return false;
  ++barrier.phase;
  barrier.waited = false;
  barrier.pending = barrier.expected;
  barrier.completed = barrier.arriving;
  barrier.joined.clear();
  const bool wakes = !barrier.waiting.empty();
  for (Fiber* fiber : barrier.waiting) wake(fiber);
  barrier.waiting.clear();
  shuffle_warps();
  return wakes;
}

void barrier_init(uint64_t* address, uint32_t arrivals) {
  if (block.barriers.size() == current->known->size() - block.threads.size())
    fail("more mbarriers than kMaxAsyncWriters");
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
  Barrier& barrier = find_barrier(address);
  if (barrier.pending == 0) fail("too many arrivals at an mbarrier: " + who());
  // A wait for a phase never ends if the barrier is two phases further.
  if (!barrier.waited) fail("arrives at an mbarrier, and nobody has waited for its last phase: " + who());
  barrier.bytes_expected += bytes;
  --barrier.pending;
  join(barrier.arriving, *current->known);
  barrier.arriving[current->thread] = current->now++;
  if (complete_if_done(barrier)) pause();  // the threads that waited may run before the last arrived thread
}

void barrier_arrive_in_cluster(Site site, uint64_t* address, uint32_t rank) {
  if (rank >= static_cast<uint32_t>(block.registers.free.size()))
    fail("the cluster has no block " + std::to_string(rank) + ": " + text(site) + ", " + who());
  uint64_t* there = in_rank(address, static_cast<int>(rank));
  if (static_cast<int>(rank) != own_rank())
    block.remote_arrivals.push_back({current->thread, static_cast<int>(rank), current->now});
  barrier_arrive(there, 0);
}

void barrier_wait(Site site, uint64_t* address, uint32_t parity) {
  Barrier& barrier = find_barrier(address);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(current);
    wait_to_be_woken(site);
  }
  barrier.waited = true;
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

// Later writes of this thread come after the fence.
void proxy_fence() { block.threads[current->thread].proxy_fences.push_back(current->now++); }

// ---- asynchronous reads of shared memory

void check_readable(const char* reader, const Bytes& bytes, const std::vector<const Start*>& starts) {
  const auto refuse = [&](const char* what) { fail(std::string(reader) + what + who()); };
  for_each_last_write(bytes.begin, bytes.end - bytes.begin, [&](const LastWrite& last) {
    if (!last.written) refuse(" reads memory that nobody wrote: ");
    if (!last.landed) refuse(" reads bytes that have not landed: ");
    uint32_t time = last.time;
    const bool by_thread = last.writer < static_cast<int>(block.threads.size());
    if (by_thread) {
      const std::vector<uint32_t>& fences = block.threads[last.writer].proxy_fences;
      const auto fence = std::lower_bound(fences.begin(), fences.end(), time);
      if (fence == fences.end()) refuse(" reads bytes that a thread wrote, with no proxy fence: ");
      time = *fence;
    }
    const Clock* sufficient = nullptr;  // threads that met share a clock
    for (const Start* start : starts) {
      if (start->known.get() == sufficient && start->thread != last.writer) continue;
      const bool known = by_thread && start->thread == last.writer ? time < start->now
                                                                   : time <= (*start->known)[last.writer];
      if (!known)
        fail(std::string("race: ") + reader + " reads bytes that its thread has not waited for: " + who());
      if (start->thread != last.writer) sufficient = start->known.get();
    }
  });
}

namespace {

constexpr uintptr_t kPage = 1024;

// The pages of shared memory that some bytes overlap: [first, second).
std::pair<size_t, size_t> pages(const Bytes& bytes) {
  const auto shared = reinterpret_cast<uintptr_t>(shared_begin());
  return {(bytes.begin - shared) / kPage, (bytes.end - shared + kPage - 1) / kPage};
}

}  // namespace

void remember_read(const Bytes& bytes, int first_thread, const std::vector<Fiber*>& fibers) {
  const auto [first, end] = pages(bytes);
  if (block.reads_of_page.size() < end) block.reads_of_page.resize(end);
  const auto is_this = [&](size_t n) {
    const Read& r = block.reads[n];
    return r.first_thread == first_thread && r.times.size() == fibers.size() &&
           r.bytes.begin == bytes.begin && r.bytes.end == bytes.end;
  };
  const std::vector<size_t>& known = block.reads_of_page[first];
  const auto found = std::find_if(known.begin(), known.end(), is_this);
  const size_t n = found == known.end() ? block.reads.size() : *found;
  if (n == block.reads.size()) {
    block.reads.push_back({bytes, first_thread, std::vector<uint32_t>(fibers.size())});
    for (size_t page = first; page < end; ++page) block.reads_of_page[page].push_back(n);
  }
  for (const Fiber* fiber : fibers) block.reads[n].times[fiber->thread - first_thread] = fiber->now;
}

void check_not_read(const char* writer, const Bytes& target) {
  for (const BulkStore& store : block.stores)
    if (!store.has_read && store.source.overlaps(target))
      fail(std::string(writer) + " overwrites bytes that a bulk copy still reads: " + who());
  const auto check = [&](const Read& read) {
    if (!read.bytes.overlaps(target)) return;
    const int threads = static_cast<int>(read.times.size());
    for (int warp = 0; warp < threads;
         warp += kWarp) {  // one lane is enough, because a warp waits as a whole
      bool known = false;
      for (int t = warp; t < std::min(warp + kWarp, threads) && !known; ++t)
        known = current->knows(read.first_thread + t, read.times[t]);
      if (!known)
        fail(std::string("race: ") + writer +
             " overwrites bytes that were read on their own, with no barrier in between: " + who());
    }
  };
  const auto [first, end] = pages(target);
  for (size_t page = first; page < std::min(end, block.reads_of_page.size()); ++page)
    for (const size_t n : block.reads_of_page[page]) check(block.reads[n]);
}

void hopper_check_write(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  check_not_read("a thread", {begin, begin + bytes});
}

// ---- begin and end of a block

void hopper_begin_block(int threads, int ranks) {
  block = {};
  block.threads.resize(threads);
  begin_registers(threads, ranks);
}

std::shared_ptr<void> hopper_leave_block() { return std::make_shared<Block>(std::move(block)); }

void hopper_enter_block(const std::shared_ptr<void>& left) {
  block = std::move(*static_cast<Block*>(left.get()));
}

namespace {

// A block's shared memory exists until its last thread ends. So one of its threads must know of each remote event before it
// ends: an arrival of another block, and a copy into several blocks. Returns an error or an empty text.
std::string shared_memory_that_ended_too_early(const KnownAtTheEnd& knows) {
  for (const auto& [thread, rank, time] : block.remote_arrivals)
    if (!knows(rank, thread, time))
      return "a block may end before another block has arrived at its mbarrier: " + describe(thread);
  if (!block.multicasts) return "";
  for (const auto& [address, barrier] : block.barriers)
    if (!knows(rank_of_address(reinterpret_cast<uintptr_t>(address)), barrier.writer, barrier.copies))
      return "a block may end before a copy into several blocks has landed in its shared memory";
  return "";
}

}  // namespace

std::string hopper_end_block(const KnownAtTheEnd& knows) {
  if (!block.copies.empty()) return "the block ended before a copy by TMA had landed";
  for (const Thread& thread : block.threads)
    if (!thread.products.empty()) return "the block ended before a wgmma was waited for";
  for (const BulkStore& store : block.stores)
    if (!store.has_read) return "the block ended before a bulk copy had read its source";
  for (const auto& [address, barrier] : block.barriers)
    if (barrier.bytes_expected != 0)
      return "the block ended before an mbarrier had the bytes that it expects";
  for (size_t n = 0; n < block.threads.size(); ++n) land_stores(n, block.threads[n].bulk_groups + 1);
  return shared_memory_that_ended_too_early(knows);
}

}  // namespace cuda_host
