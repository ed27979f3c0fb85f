"""Shapes at the tile edges and the instruction sets, written once.

A tile is 48 or 64 queries by 64 or 128 keys (csrc/cpu/kernels/tiling-inl.h).
"""

import platform

# Instruction set -> CPU features that it needs. The slowest set comes first.
KERNELS_ON_ARM = {"generic": "nothing special", "neon": "64-bit ARM", "neon_bf16": "FEAT_BF16"}
KERNELS_ON_X86 = {
    "generic": "nothing special",
    "avx2": "AVX2, FMA and F16C",
    "avx512": "AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C",
    "avx512_bf16": "AVX-512 BF16, F, BW, DQ and VL, AVX2, FMA and F16C",
    "amx": "AMX for bfloat16, AVX-512 BF16, F, BW, DQ and VL, AVX2, FMA and F16C",
}
KERNELS = KERNELS_ON_ARM if platform.machine() in ("aarch64", "arm64") else KERNELS_ON_X86

EDGES = [1, 2, 3, 15, 16, 17, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 200]

# (seqlen_q, seqlen_k): each edge against itself and against unlike partners, both ways.
LENGTHS = sorted(
    {(n, n) for n in EDGES} | {(n, 70) for n in EDGES} | {(70, n) for n in EDGES} | {(1, 300), (300, 1), (130, 260)}
)

# (head_dim, head_dim_v): below, at and above whole vectors of every ISA; odd; unequal; the largest.
HEAD_DIMS = [(1, 1), (3, 5), (8, 8), (16, 16), (17, 33), (32, 32), (40, 24), (64, 64), (65, 63), (80, 128), (96, 96)]
HEAD_DIMS += [(128, 64), (192, 128), (256, 256), (512, 512), (511, 1)]
