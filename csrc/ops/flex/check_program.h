// Checks an encoded program (core/program.h): after this check no program can make the kernels read outside its memory.
#pragma once

#include "../../core/program.h"

namespace flash_attn_ext {

enum class ProgramUse { kScore, kGradient, kCapturedGradient, kMask };

// The program in the first of `count` words. Throws ValueError if it is none, or if it could read beyond the rows of
// `captured` numbers and `captured_ints` integers.
Program check_program(const int64_t* words, int64_t count, ProgramUse use, int64_t captured,
                      int64_t captured_ints);

}  // namespace flash_attn_ext
