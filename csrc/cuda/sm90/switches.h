// Choices of the forward that no GPU has judged yet, each a switch: 1 or 0, as here or as nvcc is told by -D. Here they
// are what FlashAttention-3 does. benchmarks/gpu/switches.py, a stage of `make gpu`, finds them in this file and times
// the plain kernels with each of them on and off.
#pragma once

// Plain calls store out by TMA, not by their threads.
#if !defined(FLASH_ATTN_EXT_SM90_TMA_STORE)
#define FLASH_ATTN_EXT_SM90_TMA_STORE 1
#endif

// Up to a head dimension of 128 plain calls have persistent blocks: as many as there are multiprocessors, each with a
// task of each round. So the next task's Q and first K come under the end of the last one.
#if !defined(FLASH_ATTN_EXT_SM90_PERSISTENT)
#define FLASH_ATTN_EXT_SM90_PERSISTENT 1
#endif

// Up to a head dimension of 128 the consumer warpgroups of plain calls start their products in turns (ping_pong.cuh).
#if !defined(FLASH_ATTN_EXT_SM90_PING_PONG)
#define FLASH_ATTN_EXT_SM90_PING_PONG 1
#endif
