// Hopper's asynchronous units on the host: mbarriers, TMA, wgmma. What include/hopper_on_host.h declares is
// for the kernels; this here is for fibers.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace cuda_host {

void hopper_begin_block(int threads);
// Lets one outstanding copy land; false if there is none.
bool hopper_land_one();
// Before a thread writes to shared memory: an error if something asynchronous may still read there.
void hopper_check_write(const void* address, size_t bytes);
// Another block goes on before this one: takes away what is known of it, and brings it back.
std::shared_ptr<void> hopper_leave_block();
void hopper_enter_block(const std::shared_ptr<void>& left);
// What is left undone when all threads have ended; empty if nothing.
std::string hopper_end_block();

}  // namespace cuda_host
