// Runs the kernels of a call on torch's threads.
#pragma once

#include <ATen/Parallel.h>

namespace flash_attn_ext {

// The function of cpu::Parallel.
inline void run_on_torch_threads(int threads, void (*worker)(void* context, int thread), void* context) {
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) worker(context, static_cast<int>(thread));
  });
}

}  // namespace flash_attn_ext
