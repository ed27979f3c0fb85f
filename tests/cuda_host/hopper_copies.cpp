// TMA and bulk copies as the PTX manual defines them. If the manual leaves a choice, the model makes the choice that is
// worst for the kernel:
//   - A copy to shared memory lands when all threads wait, in random order. From its start its target holds NaN, and an
//     access to the target is an error. It is also an error to start a copy while another operation may still read the
//     target, or without the fence of the barriers.
//   - An addition or a copy to global memory reads its source when its thread waits for the read. It is complete when the
//     thread waits for its completion, or when the block ends. A write to the source before the read is an error.
//   - It is an error if a block ends before a copy has landed, or before a copy has read its source.

#include <algorithm>

#include "hopper_block.h"
#include "memory.h"

namespace cuda_host {

uintptr_t swizzled(uintptr_t address) {
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(shared_begin());
  return reinterpret_cast<uintptr_t>(shared_begin()) + (offset ^ (offset >> 7 & 7) << 4);
}

namespace {

using Corner = std::array<int32_t, CUtensorMap::kMaxRank>;

template <class Function>  // (row of the box, its address in the tensor or null)
void for_each_row(const CUtensorMap& map, const Corner& corner, const Function& function) {
  uint32_t rows = 1;
  for (int n = 1; n < map.rank; ++n) rows *= map.box[n];
  for (uint32_t row = 0; row < rows; ++row) {
    unsigned char* source = map.data + map.element_bytes * corner[0];
    uint32_t rest = row;
    for (int n = 1; n < map.rank; ++n) {
      const int64_t at = int64_t{corner[n]} + rest % map.box[n];
      rest /= map.box[n];
      const bool inside = source && 0 <= at && at < static_cast<int64_t>(map.size[n]);
      source = inside ? source + at * static_cast<int64_t>(map.stride[n - 1]) : nullptr;
    }
    function(row, source);
  }
}

// The 16-byte pieces of a box that are inside of the tensor: (row of the box, column, address).
template <class Function>
void for_each_piece(const CUtensorMap& map, const Corner& corner, const Function& function) {
  const int64_t left = static_cast<int64_t>(map.size[0]) - corner[0];
  for_each_row(map, corner, [&](uint32_t row, unsigned char* start) {
    for (int64_t n = 0; start && n < std::min<int64_t>(left, map.box[0]); n += 16 / map.element_bytes)
      function(row, n, start + map.element_bytes * n);
  });
}

// The position of a box in a tensor and in shared memory.
struct Box {
  Corner corner{};
  Bytes shared;
};

Box box_of(Site site, const CUtensorMap& map, const int32_t* corner, int rank, const void* shared) {
  if (rank != map.rank)
    fail("TMA: a corner of " + std::to_string(rank) + " numbers for a map of " + std::to_string(map.rank) +
         ": " + text(site));
  Box box;
  std::copy_n(corner, rank, box.corner.begin());
  size_t bytes = map.element_bytes;
  for (int n = 0; n < rank; ++n) bytes *= map.box[n];
  const auto begin = reinterpret_cast<uintptr_t>(shared);
  if (begin % 128 != 0 || map.box[0] * map.element_bytes != 128)
    fail("TMA: a box of 128-byte rows, at a multiple of 128 bytes");
  box.shared = {begin, begin + bytes};
  return box;
}

// The steps of every copy to shared memory.
void start_copy(Site site, void* shared, size_t bytes, uint64_t* address, std::function<void()> land) {
  Barrier& barrier = find_barrier(address);
  if (barrier.fence_time == 0 || !current->knows(barrier.init_thread, barrier.fence_time))
    fail("TMA does not see an mbarrier, for want of a fence: " + text(site) + ", " + who());
  const auto target = reinterpret_cast<uintptr_t>(shared);
  const Bytes range{target, target + bytes};
  check_no_product_reads("TMA", range);
  check_not_read("TMA", range);
  for_each_last_write(target, bytes, [&](const LastWrite& last) {
    if (last.written && !last.landed) fail("TMA writes where another copy has not landed: " + text(site));
    if (last.written && !current->knows(last.writer, last.time))
      fail("race: TMA overwrites bytes that were written with no barrier in between: " + text(site) + ", " +
           who());
  });
  std::memset(shared, 0xff, bytes);
  set_last_write(target, bytes, {true, false, barrier.writer, 0});
  block.copies.push_back({range, &barrier, std::move(land)});
}

}  // namespace

void load_box(Site site, void* shared, const CUtensorMap* map, const int32_t* corner, int rank,
              uint64_t* address) {
  const Box box = box_of(site, *map, corner, rank, shared);
  const Corner from = box.corner;
  const uintptr_t target = box.shared.begin;
  for_each_piece(*map, from, [&](uint32_t, int64_t, const unsigned char* source) {
    check_global_read(source, 16, __builtin_return_address(0));
  });
  start_copy(site, shared, box.shared.end - target, address, [=] {
    for_each_row(*map, from, [&](uint32_t row, const unsigned char* source) {
      for (int64_t column = 0; column < map->box[0]; ++column) {
        const int bytes = map->element_bytes;
        auto* to = reinterpret_cast<void*>(swizzled(target + row * 128 + column * bytes));
        if (source && from[0] + column < static_cast<int64_t>(map->size[0])) {
          std::memcpy(to, source + column * bytes, bytes);
        } else {
          std::memset(to, 0, bytes);
        }
      }
    });
  });
}

// As load_box() in each of the blocks, with the barrier in the same place.
void load_box_into_blocks(Site site, void* shared, const CUtensorMap* map, const int32_t* corner, int rank,
                          uint64_t* address, uint32_t blocks) {
  const auto ranks = static_cast<uint32_t>(block.registers.free.size());
  if (blocks == 0 || blocks >= 1u << ranks)
    fail("the cluster has not all blocks of the mask " + std::to_string(blocks) + ": " + text(site) + ", " +
         who());
  block.multicasts = true;
  for (uint32_t to = 0; to < ranks; ++to)
    if (blocks >> to & 1)
      load_box(site, in_rank(static_cast<unsigned char*>(shared), to), map, corner, rank,
               in_rank(address, to));
}

void load_bytes(Site site, void* shared, const void* global, uint32_t bytes, uint64_t* address) {
  if (bytes % 16 != 0 ||
      (reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0)
    fail("a bulk copy of pieces of 16 aligned bytes: " + text(site));
  for (uint32_t n = 0; n < bytes; n += 16)
    check_global_read(static_cast<const char*>(global) + n, 16, __builtin_return_address(0));
  start_copy(site, shared, bytes, address, [=] { std::memcpy(shared, global, bytes); });
}

bool hopper_land_one() {
  if (block.copies.empty()) return false;
  std::swap(block.copies[random_below(block.copies.size())], block.copies.back());
  const Copy copy = block.copies.back();
  block.copies.pop_back();
  copy.land();
  Barrier& barrier = *copy.barrier;
  const size_t bytes = copy.target.end - copy.target.begin;
  set_last_write(copy.target.begin, bytes, {true, true, barrier.writer, ++barrier.copies});
  barrier.arriving[barrier.writer] = barrier.copies;
  barrier.bytes_expected -= bytes;
  complete_if_done(barrier);
  return true;
}

// ---- from shared to global memory

namespace {

// The thread now knows that its stores are complete.
void check_source(const Bytes& source) {
  const Start start{current->thread, current->now, current->known};
  check_readable("a bulk copy", source, {&start});
}

void start_store(const Bytes& source, std::function<void(const unsigned char*)> land) {
  block.stores.push_back(
      {current->thread, block.threads[current->thread].bulk_groups, source, std::move(land), false, {}});
}

}  // namespace

void bulk_add(Site site, float* sums, const float* terms, uint32_t count) {
  const auto source = reinterpret_cast<uintptr_t>(terms);
  const size_t bytes = count * sizeof(float);
  if (bytes % 16 != 0 || (source | reinterpret_cast<uintptr_t>(sums)) % 16 != 0)
    fail("a bulk copy of pieces of 16 aligned bytes: " + text(site));
  check_source({source, source + bytes});
  start_store({source, source + bytes}, [=](const unsigned char* read) {
    for (uint32_t n = 0; n < count; ++n) sums[n] += reinterpret_cast<const float*>(read)[n];
  });
  add_to_global(sums, bytes, __builtin_return_address(0));
}

void store_box(Site site, const CUtensorMap* map, const int32_t* corner, int rank, const void* shared) {
  const Box box = box_of(site, *map, corner, rank, shared);
  const uintptr_t begin = box.shared.begin;
  for_each_piece(*map, box.corner, [&](uint32_t row, int64_t column, unsigned char* to) {
    const uintptr_t from = swizzled(begin + row * 128 + column * map->element_bytes);
    check_source({from, from + 16});
    touch(to, 16, true, __builtin_return_address(0));
  });
  start_store(box.shared, [map = *map, corner = box.corner, begin](const unsigned char* read) {
    for_each_piece(map, corner, [&](uint32_t row, int64_t column, unsigned char* to) {
      std::memcpy(to, read + (swizzled(begin + row * 128 + column * map.element_bytes) - begin), 16);
    });
  });
}

void bulk_commit() { ++block.threads[current->thread].bulk_groups; }

void bulk_wait_read() {
  for (BulkStore& store : block.stores) {
    if (store.has_read || store.thread != current->thread ||
        store.group >= block.threads[current->thread].bulk_groups)
      continue;
    store.read.assign(reinterpret_cast<const unsigned char*>(store.source.begin),
                      reinterpret_cast<const unsigned char*>(store.source.end));
    store.has_read = true;
    remember_read(store.source, current->thread, {current});
  }
}

void land_stores(int thread, int group_end) {
  const auto lands = [&](const BulkStore& store) {
    return store.thread == thread && store.group < group_end;
  };
  for (const BulkStore& store : block.stores)
    if (lands(store) && store.has_read) store.land(store.read.data());
  block.stores.erase(std::remove_if(block.stores.begin(), block.stores.end(), lands), block.stores.end());
}

void bulk_wait() {
  bulk_wait_read();
  land_stores(current->thread, block.threads[current->thread].bulk_groups);
}

// ---- blocks that take turns

void release_bulk_turn(Site site, int32_t* turns) {
  for (const BulkStore& store : block.stores)
    if (store.thread == current->thread)
      fail("a turn ends before the added values are there: " + text(site) + ", " + who());
  release_turn(turns);
}

// As on a GPU, the bits from 24 on are the number of the block in its cluster. A descriptor has no place for these bits.
uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - shared_of_rank(own_rank());
  return static_cast<uint32_t>(own_rank()) << 24 | static_cast<uint32_t>(offset);
}

unsigned char* shared_of_block(unsigned char*) { return shared_of_rank(own_rank()); }

}  // namespace cuda_host
