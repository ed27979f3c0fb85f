"""Removes each barrier, wait, fence and arrival of the sm90 kernels in turn and says what the host run finds.

    PYTHONPATH=. python tests/cuda_host/mutations_sm90.py > tests/cuda_host/mutations_sm90.md

tests/test_cuda_sm90_mutations.py does the same, and compares the list with that file.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from cuda_host import library
from cuda_host.mutations import judge, link

from flash_attn_ext import flash_attn

CUDA = library.ROOT / "csrc" / "cuda"
SOURCE = Path("sm90/forward.cuh")
SEEDS = 3

# One head dimension and one dtype are enough: the others are the same text.
INSTANCE = Path("sm90/forward_bfloat16.cu")
INSTANCE_TEXT = """#include "forward.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_bfloat16(const AttentionParams& p, void*, cudaStream_t stream) {
  return launch_head_dim<__nv_bfloat16, 64>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
"""


@dataclass(frozen=True)
class Mutation:
    line: int
    start: int  # of the statement's text
    statement: str
    comment: str

    def __str__(self):
        return f"line {self.line} `{self.statement}` {self.comment}"

    def apply(self, text):
        """Leaves the semicolon, an empty statement."""
        return text[: self.start] + text[self.start + len(self.statement) :]


def mutations():
    """All that synchronises, with the comment that says what it makes safe."""
    text = (CUDA / SOURCE).read_text()
    calls = r"(?:ptx::(?:barrier|wgmma)_\w+(?:<\d>)?|__syncthreads|shared\.[kv]\.release)\([^;]*\)"
    found = re.finditer(rf"({calls});(?:\s*//\s*([^\n]*))?\n", text)
    return [Mutation(text.count("\n", 0, m.start()) + 1, m.start(1), m.group(1), m.group(2) or "") for m in found]


def build_mutated(mutation, folder, built):
    """The library with one statement less: what is rebuilt comes first, the rest is taken from the build as it is."""
    sources, objects = folder / "csrc", folder / "objects"
    shutil.copytree(CUDA.parent, sources)
    if mutation:
        path = sources / "cuda" / SOURCE
        path.write_text(mutation.apply(path.read_text()))
    (sources / "cuda" / INSTANCE).write_text(INSTANCE_TEXT)
    target = objects / INSTANCE.with_suffix(".o")
    make = ["make", "-C", library.HERE, f"SOURCES={sources}", f"BUILD={objects}", target]
    subprocess.run(make, check=True, capture_output=True)
    return link(folder, built, objects, [str(INSTANCE.with_suffix(".o"))])


def results(path, seed):
    """A call of two blocks, the second of them with warpgroups without rows, and seven tiles of keys."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 200, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 850, 64, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad(), library.as_cpu_kernels(library.Library(path, seed)) as loaded:
        loaded.c.set_compute_capability(9, 0)
        out, lse = flash_attn(q, k, v, return_lse=True)
        assert b"sm90::forward_kernel" in loaded.c.last_kernel()
        loaded.c.set_compute_capability(8, 0)
    return out, lse


def what_is_found(mutation, built, expected):
    """The host run's report, or that values changed, or None: nobody would notice."""
    with tempfile.TemporaryDirectory() as folder:
        return judge(build_mutated(mutation, Path(folder), built), results, expected, SEEDS)


if __name__ == "__main__":
    built = library.build()
    expected = results(built, 1)
    print("What the host run finds if one statement of sm90/forward.cuh is removed; written by mutations_sm90.py.\n")
    print("| statement | what it makes safe | without it |\n|---|---|---|")
    for m in mutations():
        print(f"| `{m.statement}` | {m.comment} | {what_is_found(m, built, expected)} |", flush=True)
