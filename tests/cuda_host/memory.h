// Checks each access of a kernel to shared or global memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace cuda_host {

// Registers a buffer that kernels may access. Any other access is an error.
void register_buffer(const void* data, int64_t bytes, int64_t element_bytes, const char* name, bool writable,
                     bool initialised);
void forget_buffers();

// For instructions that the compiler cannot see: an access of the current thread; and an asynchronous write. An access to
// its bytes is an error until the write has landed.
void touch(const void* address, size_t bytes, bool is_write, void* code);
void begin_flight(void* address, size_t bytes);
void end_flight(void* address, size_t bytes);
// For the files hopper_*.cpp, whose accesses the compiler cannot see. For shared memory: calls check() with each distinct
// last write of the bytes; sets the writer of the bytes.
struct LastWrite {
  bool written, landed;
  int writer;
  uint32_t time;
};
void for_each_last_write(uintptr_t address, size_t bytes, const std::function<void(const LastWrite&)>& check);
void set_last_write(uintptr_t address, size_t bytes, const LastWrite& write);
// For global memory: an error if the current thread may not read these bytes.
void check_global_read(const void* address, size_t bytes, void* code);
// For global memory that several blocks of a launch may change, by an atomic instruction or a bulk addition.
void touch_atomically(const void* address, size_t bytes, void* code);
void add_to_global(float* sums, size_t bytes, void* code);
// A block learns of the blocks that told so at the same address, and of all blocks that they had learned of.
void learn_blocks_of(const void* turns);
void tell_blocks_of(const void* turns);

// The host has written a buffer, between launches.
bool set_buffer(void* data, int value, size_t bytes);

// Called by the launch.
void memory_begin_launch(const void* arguments, size_t argument_bytes);
// The blocks of a cluster have their shared memory one after the other, each as long as the first.
void memory_begin_cluster(size_t shared_bytes, int ranks);
// A thread of another block of the cluster continues. It may access the shared memory of this block alone.
void memory_enter_rank(int rank);
unsigned char* shared_of_rank(int rank);
int rank_of_address(uintptr_t address);
// Another block continues before this block: saves the shared memory of this block, and restores it.
std::shared_ptr<void> memory_leave_block();
void memory_enter_block(const std::shared_ptr<void>& left);

constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr int kMostRanks = 2;

}  // namespace cuda_host
