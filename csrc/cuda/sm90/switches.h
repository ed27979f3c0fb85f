// Choices that need a measurement on a GPU. Each is a switch, 1 or 0, defined here or by nvcc's -D.
#pragma once

// ---- Speed, in the plain forward kernels. benchmarks/gpu/switches.py, a stage of `make gpu`, finds these switches in
// this file, and times the kernels with each switch on and off. benchmarks/results/h200 has the times of an H200.

// Plain calls store out by TMA, not by their threads.
#if !defined(FLASH_ATTN_EXT_SM90_TMA_STORE)
#define FLASH_ATTN_EXT_SM90_TMA_STORE 1
#endif

// Up to a head dimension of 128, calls without functions of the user have persistent blocks: one for each
// multiprocessor, with one task in each round. So a warpgroup begins the next task while others finish the last task.
#if !defined(FLASH_ATTN_EXT_SM90_PERSISTENT)
#define FLASH_ATTN_EXT_SM90_PERSISTENT 1
#endif

// At head dimensions 96 and 128, the consumer warpgroups of plain calls alternate (ping_pong.cuh).
#if !defined(FLASH_ATTN_EXT_SM90_PING_PONG)
#define FLASH_ATTN_EXT_SM90_PING_PONG 1
#endif

// ---- Speed, in the plain backward kernel of head dimension 256. The same stage times this switch.

// Pairs of blocks load Q and dO by multicast (pairs.cuh), except in deterministic calls.
#if !defined(FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS)
#define FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS 0
#endif

// ---- Shapes of wgmma that CUTLASS does not use. If a GPU does not support one of them, its unit fails in the stage
// `units` of `make gpu`. Then set its switch to 0 in this file, so that the kernel of the next larger head dimension
// runs.

// B of 96 columns, read by rows from panels of 64 columns: head dimension 96.
#if !defined(FLASH_ATTN_EXT_SM90_WGMMA_N96)
#define FLASH_ATTN_EXT_SM90_WGMMA_N96 1
#endif

// B of 32 columns, read by rows from byte 64 of a panel's rows: the backward at head dimension
// 192, and at 64 with options.
#if !defined(FLASH_ATTN_EXT_SM90_WGMMA_N32)
#define FLASH_ATTN_EXT_SM90_WGMMA_N32 1
#endif
