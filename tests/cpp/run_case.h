// Runs one case on the kernels of one instruction set and compares the results with the reference.
#pragma once

#include "cpu/run.h"
#include "reference.h"

namespace test {

// Returns one message for each error. Also compares the bits of 1 and 3 threads on `generic`: the kernels share the code
// that distributes tasks.
std::vector<std::string> run_case(const flash_attn_ext::cpu::Kernels& kernels, const Case& c, DType dtype,
                                  const Inputs& in, const Outputs& expected);

}  // namespace test
