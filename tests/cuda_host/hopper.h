// Hopper's asynchronous units on the host: mbarriers, TMA, wgmma. These functions are for fibers.cpp and blocks.cpp; kernels
// call the functions of include/hopper_on_host.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace cuda_host {

void hopper_begin_block(int threads, int ranks);
// Completes one copy in flight. Returns false if there is none.
bool hopper_land_one();
// Before a thread writes to shared memory: an error if something asynchronous may still read there.
void hopper_check_write(const void* address, size_t bytes);
// Another block continues before this block: saves the state of this block, and restores it.
std::shared_ptr<void> hopper_leave_block();
void hopper_enter_block(const std::shared_ptr<void>& left);
// A text that names the unfinished asynchronous work when all threads have ended; empty if there is none.
// knows: whether a thread of the cluster's block `rank` has known of the event of a writer when it ended.
using KnownAtTheEnd = std::function<bool(int rank, int writer, uint32_t time)>;
std::string hopper_end_block(const KnownAtTheEnd& knows);

}  // namespace cuda_host
