// Random inputs of a case, the same in every run.
#pragma once

#include "reference.h"

namespace test {

Inputs make_inputs(const Case& c, DType dtype);

}  // namespace test
