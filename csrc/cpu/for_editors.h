// Lets an editor, or a compiler that only checks, read any -inl.h by itself: as isa_generic.cpp would include
// it.
#pragma once

#include "target_region.h"

#define FA_ISA_NAME "generic"
#define FA_VECTOR_BYTES 16
#define FA_VECTOR_REGISTERS 16

using namespace flash_attn_ext;
using namespace flash_attn_ext::cpu;
