// Lets an editor, or a compiler that only checks syntax, read any -inl.h alone, as isa_generic.cpp includes it.
#pragma once

#include "int8.h"
#include "target_region.h"

#define FA_ISA_NAME "generic"
#define FA_VECTOR_BYTES 16
#define FA_VECTOR_REGISTERS 16

using namespace flash_attn_ext;
using namespace flash_attn_ext::cpu;
