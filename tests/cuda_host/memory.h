// Every access that a kernel makes to shared or global memory is looked at here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace cuda_host {

// Makes a piece of memory known to the kernels; an access anywhere else is an error.
void register_buffer(const void* data, int64_t bytes, int64_t element_bytes, const char* name, bool writable,
                     bool initialised);
void forget_buffers();

// For instructions that the compiler cannot see: an access by the current thread, and an asynchronous write,
// which nobody may touch before it has landed.
void touch(const void* address, size_t bytes, bool is_write, void* code);
void begin_flight(void* address, size_t bytes);
void end_flight(void* address, size_t bytes);
// For hopper.cpp, which accesses memory without the compiler's knowledge. Shared memory, by its writers: each
// distinct last write of the bytes is given to `check`; and who wrote them is set.
struct LastWrite {
  bool written, landed;
  int writer;
  uint32_t time;
};
void for_each_last_write(uintptr_t address, size_t bytes, const std::function<void(const LastWrite&)>& check);
void set_last_write(uintptr_t address, size_t bytes, const LastWrite& write);
// Global memory: an error if the current thread may not read there.
void check_global_read(const void* address, size_t bytes, void* code);
// Global memory that several blocks of a launch may change: by an atomic instruction, and by adding in bulk.
void touch_atomically(const void* address, size_t bytes, void* code);
void add_to_global(float* sums, size_t bytes, void* code);
// A block learns of those that told so at the same place, and of whom they had learned.
void learn_blocks_of(const void* turns);
void tell_blocks_of(const void* turns);

// The host writes a buffer, between launches.
bool set_buffer(void* data, int value, size_t bytes);

// Called by the launch.
void memory_begin_launch(const void* arguments, size_t argument_bytes);
void memory_begin_block(size_t shared_bytes);
// Another block goes on before this one: takes its shared memory away, and brings it back.
std::shared_ptr<void> memory_leave_block();
void memory_enter_block(const std::shared_ptr<void>& left);

constexpr size_t kMaxSharedBytes = 227 << 10;

}  // namespace cuda_host
