// Runs one case through one instruction set's kernels, for several numbers of threads, and compares.
#pragma once

#include "cpu/run.h"
#include "reference.h"

namespace test {

constexpr int kThreadCounts[] = {1, 3};

// Every discrepancy found, one message each; none if the kernels are right.
std::vector<std::string> run_case(const flash_attn_ext::cpu::Kernels& kernels, const Case& c, DType dtype,
                                  const Inputs& in, const Outputs& expected);

}  // namespace test
