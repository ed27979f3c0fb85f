// A rehearsal of CUDA graph capture: between begin_capture() and end_capture() work is recorded, and replay() runs it.
#pragma once

#include <functional>
#include <memory>

#include "include/cuda_runtime_api.h"

namespace cuda_host {

// Records `work` if the host captures, and returns true. Otherwise the caller does it now.
bool record(const std::function<cudaError_t()>& work);

// The bytes of a kernel's arguments, which a graph copies at the launch.
std::shared_ptr<void> copy_arguments(const void* arguments, size_t bytes);

cudaError_t replay();

}  // namespace cuda_host

extern "C" void begin_capture();
extern "C" void end_capture();
