// An isa_*.cpp includes this before its target region. It includes every standard and shared header. Inside the region,
// inline functions of headers would be compiled for this ISA, and the linker might use them in other files.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "../core/arena.h"
#include "../core/mask.h"
#include "../core/params.h"
#include "../core/philox.h"
#include "../core/program.h"
#include "../core/sequence.h"
#include "../core/splits.h"
#include "../core/thread_scratch.h"
#include "half.h"
#include "key_lists.h"
#include "parallel.h"
#include "run.h"
#include "task_list.h"
#include "tile_frame.h"
#include "turns.h"
#include "widen_float8.h"

#define FA_INLINE __attribute__((always_inline)) inline
#define FA_INLINE_LAMBDA __attribute__((always_inline))
// For a function that several callers share, so that the callers have no copies of it.
#define FA_NOINLINE __attribute__((noinline))

// FA_TARGET_BEGIN("avx2,fma") ... FA_TARGET_END: functions between them are compiled for these features.
#define FA_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FA_TARGET_BEGIN(features) \
  FA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FA_TARGET_END FA_PRAGMA(clang attribute pop)
#else
#define FA_TARGET_BEGIN(features) FA_PRAGMA(GCC push_options) FA_PRAGMA(GCC target(features))
#define FA_TARGET_END FA_PRAGMA(GCC pop_options)
#endif
