// Hopper's asynchronous units on the host: mbarriers, TMA, wgmma. What include/hopper_on_host.h declares is
// for the kernels; this here is for fibers.cpp.
#pragma once

#include <string>

namespace cuda_host {

void hopper_begin_block(int threads);
// Lets one outstanding copy land; false if there is none.
bool hopper_land_one();
// What is left undone when all threads have ended; empty if nothing.
std::string hopper_end_block();

}  // namespace cuda_host
