"""Removes each barrier and each wait of the CUDA kernels in turn, and lists the findings of the host run.

    PYTHONPATH=. python tests/cuda_host/mutations.py > tests/cuda_host/mutations.md

tests/cuda/test_cuda_mutations.py does the same, and compares the list with that file. The kernels are built once, with
a condition at each of these statements. interface.cpp selects the statement to skip. mutations_sm90.py does the same
for sm90.
"""

import functools
import os
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

from flash_attn_ext import flash_attn, indexer_loss, indexer_scores

CUDA = library.ROOT / "csrc" / "cuda"
# The objects to rebuild. One dtype is enough, because all dtypes have the same text.
REBUILT = [
    f"simt/{name}.o"
    for name in ("forward_float32", "backward_float32", "indexed_float32", "indexer_float32", "key_lists")
]
REBUILT += [f"sm80/{name}_bfloat16.o" for name in ("forward", "jvp", "decode", "backward")]
REBUILT += ["sm75/forward_float16.o"]
# Whole statements, and expressions that are assigned or returned.
BARRIER = r"(?:__sync(?:threads|warp)\w*|ptx::cp_async_(?:wait<[^<>()]*>|commit)|ptx::\w+_turn)\([^()]*\);?"
SEEDS = 2


@dataclass(frozen=True)
class Mutation:
    path: Path  # below csrc/cuda
    start: int  # of the statement's text
    end: int
    statement: str
    number: int  # by which interface.cpp skips the statement

    def __str__(self):
        return f"{self.path} `{self.statement}` {self.number}"


def check_list(listed, found):
    """Checks that a list in Markdown has exactly these mutations, and that each of them was noticed."""
    rows = re.findall(r"^\| (\S+) \| `(.*)` \| .* \|$", listed, re.MULTILINE)
    assert sorted(rows) == sorted((str(mutation.path), mutation.statement) for mutation in found)
    assert found
    assert "| None |" not in listed


def mutations():
    """Every barrier and wait in the kernels' sources."""
    found = []
    for path in sorted(p for p in CUDA.rglob("*.cu*") if p.parent.name != "sm90"):  # that is mutations_sm90.py's
        found += [
            Mutation(path.relative_to(CUDA), *match.span(), match.group(), len(found) + n)
            for n, match in enumerate(re.finditer(BARRIER, path.read_text()))
        ]
    return found


def with_conditions(text, mutations, conditional):
    """The source with `conditional(text, number)` in place of each statement: it asks whether the statement runs."""
    for m in sorted(mutations, key=lambda m: m.start, reverse=True):
        text = text[: m.start] + conditional(text[m.start : m.end], m.number) + text[m.end :]
    return 'extern "C" bool statement_stays(int number);\n' + text


def conditional(statement, number):
    """A skipped barrier that returns a value is replaced by its argument."""
    call = statement.rstrip(";")
    otherwise = f"int({re.search(r'_or.(.*).', call).group(1)})" if "_or(" in call else "void()"
    return f"(statement_stays({number}) ? {call} : {otherwise})" + statement[len(call) :]


def build(folder, built):
    """The library with the conditions: the rebuilt objects first, then all other objects of the build."""
    sources, objects = folder / "csrc", folder / "objects"
    shutil.copytree(CUDA.parent, sources)
    found = mutations()
    for path in {m.path for m in found}:
        changed = with_conditions((CUDA / path).read_text(), [m for m in found if m.path == path], conditional)
        (sources / "cuda" / path).write_text(changed)
    targets = [objects / name for name in REBUILT]
    make = ["make", "-j2", "-C", library.HERE, f"SOURCES={sources}", f"BUILD={objects}", *targets]
    subprocess.run(make, check=True, capture_output=True)
    return link(folder, built, objects, REBUILT)


def link(folder, built, objects, rebuilt):
    """The library of the objects named `rebuilt`, from `objects`, and of all other objects of the build."""
    left_out = {built.parent / name for name in ("faulty.o", *rebuilt)}
    unchanged_objects = [o for o in built.parent.rglob("*.o") if o not in left_out]
    result = folder / "libmutated.so"
    targets = [objects / name for name in rebuilt]
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-o", result, *targets, *unchanged_objects], check=True)
    return result


def results(path, seed):
    """The results of calls that reach every barrier."""
    torch.manual_seed(0)
    q = torch.randn(1, 4, 70, 20, requires_grad=True)
    k, v = (torch.randn(1, 2, 131, 20, requires_grad=True) for _ in range(2))
    mask = torch.randn(1, 4, 70, 131).requires_grad_()
    large = torch.full((70, 131), -1e9)  # an lse that is not exact
    slopes, sink = (torch.rand(4, requires_grad=True) for _ in range(2))
    found = []
    with library.as_cpu_kernels(library.Library(path, seed)) as loaded:
        out = flash_attn(q, k, v, mask, alibi_slopes=slopes, sink=sink, is_causal=True, enable_gqa=True)
        found += [out, *torch.autograd.grad(out.sin().sum(), (q, k, v, mask, slopes, sink))]
        out = flash_attn(q, k, v, large, alibi_slopes=slopes, enable_gqa=True)  # the last tile has 3 keys
        found += [out, *torch.autograd.grad(out.sin().sum(), (q, k, v, slopes))]
        half = [t.detach().bfloat16() for t in (torch.randn(1, 1, 150, 64), torch.randn(1, 1, 200, 64))]
        half.append(half[1].clone())
        half[2][:, :, 140] = torch.inf  # seen from row 140 on
        found += [flash_attn(*half, causal="upper_left").nan_to_num(), flash_attn(*half[:2], half[1])]
        loaded.num_splits = 2
        found += [flash_attn(q[:, :, :2], k, v, enable_gqa=True)]
        few = [torch.randn(1, 4, 8, 64).bfloat16(), *(torch.randn(1, 2, 500, 64).bfloat16() for _ in range(2))]
        few[2][:, :, 30:480:50] = torch.nan  # the first row sees none of these keys, the other rows do
        mask = torch.rand(8, 500) > 0.2
        mask[0, 30:480:50], mask[1:, 30:480:50] = False, True
        found += [flash_attn(*few, mask, enable_gqa=True).nan_to_num(), flash_attn(*few[:2], few[1], enable_gqa=True)]
    return found


def sm80_backward_results(path, seed):
    """The same for the sm80 backward: key blocks that take turns, and a NaN that must not reach masked rows."""
    torch.manual_seed(0)
    found = []
    for head_dim in (64, 256):  # 256: warps share keys, and Q has one buffer
        q, dout = (torch.randn(1, 2, 150, head_dim).bfloat16() for _ in range(2))
        k, v = (torch.randn(1, 1, 200, head_dim).bfloat16() for _ in range(2))
        mask = torch.ones(150, 200, dtype=torch.bool)
        mask[60] = mask[:, 90] = False
        q[:, :, 60, 5] = k[:, :, 90, 5] = torch.nan  # not in the elements of the threads that write the flags
        inputs = [t.requires_grad_() for t in (q, k, v)]
        with library.as_cpu_kernels(library.Library(path, seed, deterministic=True)):
            out = flash_attn(*inputs, mask, enable_gqa=True)
            found += [out, *torch.autograd.grad(out, inputs, dout)]
    return found


def sm80_jvp_results(path, seed):
    """The same for the sm80 jvp, with two buffers and with one: several key tiles, NaN in values and tangents."""
    torch.manual_seed(0)
    found = []
    with library.as_cpu_kernels(library.Library(path, seed)):
        for head_dim in (64, 72):
            primals, tangents = (
                tuple(torch.randn(1, 1, n, head_dim).bfloat16() for n in (150, 200, 200)) for _ in range(2)
            )
            primals[2][:, :, 140], tangents[2][:, :, 145] = torch.inf, torch.nan
            for causal in (None, "upper_left"):
                attend = functools.partial(flash_attn, causal=causal, return_lse=True)
                for results in torch.func.jvp(attend, primals, tangents):
                    found += [t.nan_to_num() for t in results]
    return found


def indexed_results(path, seed):
    """Attention by index: rows of more numbers than threads of a block, more queries of a key than pairs."""
    torch.manual_seed(0)
    q = torch.randn(1, 4, 70, 20, requires_grad=True)
    k, v = (torch.randn(1, 2, 310, 20, requires_grad=True) for _ in range(2))
    indices = torch.stack([torch.randperm(310)[:300] for _ in range(70)])[None, None]
    large = torch.zeros(1, 4, 1, 310)
    large[:, 0] = -1e9  # an lse that is not exact, of one head
    with library.as_cpu_kernels(library.Library(path, seed)):
        out = flash_attn(q, k, v, large, enable_gqa=True, key_indices=indices)
        return [out, *torch.autograd.grad(out.sin().sum(), (q, k, v))]


def indexer_results(path, seed):
    """The indexer: more slots of a row than threads of a block, some keys twice, more queries of a key than pairs."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((1, 2, 70, 20), (1, 310, 20), (1, 70, 2))]
    query, key = torch.randn(1, 2, 70, 20), torch.randn(1, 1, 310, 20)
    indices = torch.randint(310, (1, 1, 70, 300))
    with library.as_cpu_kernels(library.Library(path, seed)):
        _, lse = flash_attn(query, key, key, enable_gqa=True, return_lse=True)
        found = [indexer_scores(*inputs, indices), indexer_loss(*inputs, query, key, lse, reduction="none")]
        return [*found, *(g for x in found for g in torch.autograd.grad(x.sin().sum(), inputs))]


def sm75_results(path, seed):
    """The forward of compute capability 7.5: its copies go through registers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (150, 200, 200))
    loaded = library.Library(path, seed)
    with loaded.on_gpu(7, 5, "sm_75"), library.as_cpu_kernels(loaded):
        return [flash_attn(q, k, v), flash_attn(q, k, v, causal="upper_left")]


# For each file, the functions that reach its barriers. Each function must find a missing barrier.
RESULTS = {
    "simt/indexed.cuh": (indexed_results,),
    "simt/indexed_backward.cuh": (indexed_results,),
    "simt/indexer.cuh": (indexer_results,),
    "simt/indexer_backward.cuh": (indexer_results,),
    "simt/key_lists.cu": (indexed_results,),
    "sm80/backward.cuh": (sm80_backward_results,),
    "sm80/forward.cuh": (results, sm80_jvp_results),
    "sm80/staged_copies.cuh": (sm75_results,),
    "sm80/tile_copies.cuh": (results, sm80_jvp_results),
}


class Judge:
    """Returns for each mutation the findings of the host run, in a library built once."""

    def __init__(self, folder, built):
        self.path = build(Path(folder), built)
        self.c = library.Library(self.path).c
        ways = {way for ways in RESULTS.values() for way in ways}
        self.expected = {way: way(built, 1) for way in (results, *ways)}

    def find_fault(self, mutation):
        """The host run's reports, or that values changed. None: the run did not notice the fault."""
        if mutation is None:
            return next(filter(None, map(self._judge, self.expected)), None)
        self.c.leave_out(mutation.number)
        try:
            found = [self._judge(way) for way in RESULTS.get(str(mutation.path), (results,))]
        finally:
            self.c.leave_out(-1)
        return None if None in found else ", ".join(dict.fromkeys(found))

    def _judge(self, way):
        return judge(self.path, way, self.expected[way], SEEDS)


def judge(path, results, expected, seeds):
    """find_fault() of a built library, by `results` of each seed."""
    for seed in range(1, seeds + 1):
        try:
            got = results(path, seed)
        except library.KernelError as error:
            return re.split(r" in void|:", str(error))[0]
        if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            return "wrong values"
    return None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        judge_of = Judge(folder, library.build())
        print("Faults that the host run reports if one barrier is removed; written by mutations.py.\n")
        print("| file | barrier | without it |\n|---|---|---|")
        for m in mutations():
            print(f"| {m.path} | `{m.statement}` | {judge_of.find_fault(m)} |", flush=True)
