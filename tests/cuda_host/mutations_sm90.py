"""Removes each barrier, wait, fence and arrival of the sm90 kernels in turn, and lists the findings of the host run.

    PYTHONPATH=. python tests/cuda_host/mutations_sm90.py > tests/cuda_host/mutations_sm90.md

tests/cuda/test_cuda_sm90_mutations.py does the same, and compares the list with that file. The kernels are built once,
with a condition before each of these statements. interface.cpp selects the statement to skip.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from cuda_host import library
from cuda_host.mutations import Mutation, judge, link, with_conditions

from flash_attn_ext import flash_attn, flash_attn_varlen

CUDA = library.ROOT / "csrc" / "cuda"
FORWARD = [f"sm90/{name}.cuh" for name in ("pipeline", "forward", "store_out", "ping_pong", "epilogue", "key_mask")]
FLOAT8 = [f"sm90/{name}.cuh" for name in ("forward_float8", "float8_rows", "transpose")]
PAIRS = ["sm90/pairs.cuh"]
BACKWARD = ["sm90/backward.cuh", "sm90/backward_tile.cuh", "sm90/recompute.cuh"]
FORWARD += ["sm90/counting_sort.cuh", "sm90/make_rounds.cu"]
SOURCES = FORWARD + BACKWARD + PAIRS + FLOAT8
SEEDS = 3
STATEMENT = (
    r"(?:ptx::(?:barrier_\w+|wgmma_(?:fence|commit|wait)|named_barrier_sync|proxy_fence|bulk_commit|bulk_wait\w*"
    r"|acquire_bulk_turn|release_bulk_turn|cluster_sync)(?:<[^>]*>)?|__syncthreads|__syncwarp"
    r"|shared\.\w+\.release)\([^;]*\)"
    r"|if \(range\.tiles == 0\) return"
)

# The comment of statements that order reads by lanes before a copy of TMA. The host run does not record who read, so it
# does not report them. On a GPU compute-sanitizer's racecheck does.
SEEN_BY_RACECHECK = "all lanes have read lse and delta"

# One dtype is enough, and one head dimension of each form: the other instances are the same text. Of the plain forward
# also one with ping-pong, and one without persistent blocks.
INSTANCES = {
    "sm90/forward_bfloat16.cu": """#include "forward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  switch (p.sizes.head_dim) {
    case 64: return launch_any_rows<__nv_bfloat16, 64>(p, choose_forward(p), workspace, stream);
    case 128: return launch_tiles<__nv_bfloat16, 128, 128, Form::kPlain>(p, {}, workspace, stream);
  }
  return launch_tiles<__nv_bfloat16, 256, 256, Form::kPlain>(p, {}, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
""",
    "sm90/forward_float8.cu": """#include "forward_float8.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_float8(const AttentionParams& p, void*, cudaStream_t stream) {
  return launch_float8<64>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
""",
    "sm90/backward_bfloat16.cu": """#include "backward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return p.sizes.head_dim == 64 ? launch_backward_head_dim<__nv_bfloat16, 64>(p, workspace, stream)
                                : launch_backward_head_dim<__nv_bfloat16, 256>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
""",
    "sm90/backward_float16.cu": """#define FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS 1
#include "backward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward_head_dim<__half, 256>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
""",
}


def mutations():
    """Every statement that synchronises."""
    found = []
    for path in SOURCES:
        for m in re.finditer(rf"({STATEMENT});(?:\s*//([^\n]*))?\n", (CUDA / path).read_text()):
            if SEEN_BY_RACECHECK in (m.group(2) or ""):
                continue
            statement = " ".join(m.group(1).split())
            found.append(Mutation(Path(path), *m.span(1), statement, len(found)))
    return found


def conditional(statement, number):
    """The condition has an else, so that it does not take the else of an `if` around it."""
    return f"if (!statement_stays({number})) {{}} else {statement}"


def build(folder, built):
    """The library with a condition before each statement."""
    found = mutations()
    changed = {
        path: with_conditions((CUDA / path).read_text(), [m for m in found if m.path == Path(path)], conditional)
        for path in SOURCES
    }
    units = {path: changed.pop(path) for path in SOURCES if path.endswith(".cu")}
    return build_changed(folder, built, INSTANCES | units, changed)


def build_changed(folder, built, instances, changed):
    """The library with `instances` compiled from changed sources, and all other objects of the build."""
    sources, objects = folder / "csrc", folder / "objects"
    shutil.copytree(CUDA.parent, sources)
    for path, text in (changed | instances).items():
        (sources / "cuda" / path).write_text(text)
    rebuilt = [str(Path(path).with_suffix(".o")) for path in instances]
    targets = [objects / name for name in rebuilt]
    make = ["make", "-j2", "-C", library.HERE, f"SOURCES={sources}", f"BUILD={objects}", *targets]
    subprocess.run(make, check=True, capture_output=True)
    return link(folder, built, objects, rebuilt)


def forward_results(path, seed):
    """One block runs three tasks with seven tiles of keys. In one task some warpgroups have no rows.

    Further calls have: ping-pong; a key mask; heads that share tiles, with split keys; a softcap; one block for each
    task; packed sequences. Two calls have a NaN that must not reach most rows. One call has this NaN and a first task
    without a visible key.
    """
    torch.manual_seed(0)
    q = torch.randn(1, 1, 400, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 850, 64, dtype=torch.bfloat16) for _ in range(2))
    poisoned = v[:, :, :4].clone()
    poisoned[:, :, 3, 5:] = torch.nan
    with torch.no_grad(), library.on_hopper(path, num_splits=1, seed=seed, deterministic=True) as loaded:
        loaded.c.set_multiprocessors(1)
        results = flash_attn(q, k, v, return_lse=True)
        results += flash_attn(*(t.repeat(1, 1, 1, 2) for t in (q, k, v)), return_lse=True)
        q = q[:, :, :200]
        results += flash_attn(q, k, v, torch.arange(850)[None, None, None] % 400 > 200, return_lse=True)
        shared = q.reshape(1, 4, 50, 64)
        results += flash_attn(shared, k, v, num_splits=2, enable_gqa=True, return_lse=True)
        assert b"combine_kernel" in loaded.c.last_kernel()
        # Of 180 sequences three have rows: the warps that sort them have two passes.
        packed = [t[0, 0, :rows].repeat(4, 1).reshape(-1, 4, 64) for t, rows in ((k, 400), (k, 300), (v, 300))]
        packed[2][130, :, 5:] = torch.nan
        cu_seqlens = [[0, *11 * [199], 398, *168 * [400]], [0, *11 * [140], 280, *168 * [300]]]
        cu_seqlens = [torch.tensor(offsets) for offsets in cu_seqlens]
        loaded.c.set_multiprocessors(2)
        results += flash_attn_varlen(*packed, *cu_seqlens, 400, 140, causal="upper_left", return_lse=True)
        assert b"sm90::forward_kernel" in loaded.c.last_kernel()
        assert loaded.kept[2].numel() > 0, "a kernel sorts the tasks"
        loaded.c.set_multiprocessors(1)
        hidden = v.clone()
        hidden[:, :, 845, 5:] = torch.nan
        results += flash_attn(shared, k, hidden, causal="lower_right", enable_gqa=True, return_lse=True)
        assert b"sm90::forward_kernel" in loaded.c.last_kernel()
        for columns, softcap in ((1, 0.0), (1, 2.0), (4, 0.0)):
            long = (t.repeat(1, 1, 1, columns) for t in (q, k[:, :, :4], poisoned))
            results += flash_attn(*long, causal="lower_right", softcap=softcap, return_lse=True)
            assert b"sm90::forward_kernel" in loaded.c.last_kernel()
    return [t.nan_to_num() for t in results]


def backward_results(path, seed):
    """Two blocks with three tiles of queries each; the same with split columns; then NaN in a row and a key."""
    shapes = ((260, 130, 64, False), (130, 66, 256, False), (20, 20, 64, True))
    return [grad.nan_to_num() for shape in shapes for grad in gradients(path, seed, *shape)]


def pairs_results(path, seed):
    """dK and dV of a pair of blocks with three tiles of queries. The order of the additions to dQ is free."""
    return gradients(path, seed, 130, 120, 256, False, torch.float16)[1:]


def gradients(path, seed, seqlen_q, seqlen_k, head_dim, poisoned, dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 1, seqlen_q, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, 1, seqlen_k, head_dim, dtype=dtype) for _ in range(2))
    if poisoned:
        k[:, :, 10, 5:] = q[:, :, 10, 5:] = torch.nan
    # The forward has only one head dimension here, and the backward need not have its results.
    out, lse = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[:3])
    in_turns = dtype is torch.bfloat16  # a deterministic call does not run in pairs
    with library.on_hopper(path, num_splits=1, seed=seed, deterministic=in_turns) as loaded:
        grads = torch.ops.flash_attn_ext.attention_backward(
            dout, None, q, k, v, None, None, None, None, None, out, lse, causal=poisoned,
            grad_mask=[True, True, True, False, False, False],
        )  # fmt: skip
        assert b"sm90::dq_kernel" in loaded.c.last_kernel()
    return grads[:3]


def float8_results(path, seed):
    """A block with seven tiles of keys, and one with a NaN that most of its rows must not see."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, 64).to(torch.float8_e4m3fn) for rows in (190, 850, 850))
    with library.on_hopper(path, seed=seed) as loaded:
        results = flash_attn(q, k, v, return_lse=True)
        poisoned = v[:, :, :200].clone()
        poisoned.view(torch.uint8)[:, :, 150, 5:] = 0x7F
        results += flash_attn(q, k[:, :, :200], poisoned, causal="upper_left", return_lse=True)
        assert b"sm90::forward_float8_kernel" in loaded.c.last_kernel()
    return [t.nan_to_num() for t in results]


WAYS = {forward_results: FORWARD, backward_results: BACKWARD, pairs_results: PAIRS, float8_results: FLOAT8}


class Judge:
    """Returns for each mutation the findings of the host run, in a library built once."""

    def __init__(self, folder, built):
        self.path = build(Path(folder), built)
        self.c = library.Library(self.path).c
        self.expected = {way: way(built, 1) for way in WAYS}

    def find_fault(self, mutation):
        """The host run's report, or that values changed. None: the run did not notice the fault."""
        if mutation is None:
            return next(filter(None, map(self._judge, WAYS)), None)
        self.c.leave_out(mutation.number)
        try:
            return self._judge(next(way for way, paths in WAYS.items() if str(mutation.path) in paths))
        finally:
            self.c.leave_out(-1)

    def _judge(self, way):
        return judge(self.path, way, self.expected[way], SEEDS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        judge_of = Judge(folder, library.build())
        print("Faults that the host run reports if one statement of sm90 is left out; written by mutations_sm90.py.\n")
        print("| file | statement | without it |\n|---|---|---|")
        for m in mutations():
            print(f"| {m.path} | `{m.statement}` | {judge_of.find_fault(m)} |", flush=True)
