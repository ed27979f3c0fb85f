"""Calls on CUDA can be captured in a CUDA graph: a rehearsal on the host.

Every run on the host rehearses (`Library.rehearse`): it records the launches of a call while the inputs hold other
values, and then runs them. So all tests of tests/cuda look for host reads. The tests here show that it finds them.
"""

import ctypes
import re
import subprocess

import pytest
import torch
from helpers import make_qkv
from paths import ROOT

from flash_attn_ext import flash_attn, flash_attn_varlen

FAULTS = {
    "correct_launch": "",
    "host_reads_an_input": "the replay used an old input",
    "pointer_to_the_hosts_stack": "out of bounds: .* reads 4 bytes at .* of unknown memory",
}
# What the launchers may call. None of these functions allocates device memory or waits for the GPU.
RUNTIME = {
    "cudaLaunchKernelEx", "cudaMemsetAsync", "cudaFuncSetAttribute", "cudaGetDevice", "cudaDeviceGetAttribute",
    "cudaGetDriverEntryPointByVersion",
}  # fmt: skip
# The same for the code that sees torch.
OF_TORCH = {"c10::cuda::CUDAGuard", "c10::cuda::getCurrentCUDAStream"}
READS_ON_THE_HOST = r"\.item(<|\()|_local_scalar_dense|\.cpu\(\)|ynchronize|cudaMalloc|cudaMemcpy"


@pytest.mark.parametrize("launcher", FAULTS)
def test_a_launcher_that_a_graph_cannot_capture_is_found(built, launcher):
    faulty = ctypes.CDLL(str(built.parent / "libfaulty.so"))
    faulty.rehearse_faulty.restype = ctypes.c_char_p
    report = faulty.rehearse_faulty(launcher.encode()).decode()
    assert re.search(FAULTS[launcher], report)
    assert bool(report) == bool(FAULTS[launcher])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_replay_reads_the_present_inputs(kernels, capability, packed):
    first, second = (make_qkv(1, 2, 130, 140, 64, dtype=torch.bfloat16) for _ in range(2))
    first, second = ([t.detach().contiguous() for t in inputs] for inputs in (first, second))
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 130], [0, 40, 140])]
    others = [torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 130], [0, 130, 140])]

    def call(qkv, cu_seqlens):
        if not packed:
            return flash_attn(*qkv, is_causal=True)
        return flash_attn_varlen(*(t[0].transpose(0, 1).contiguous() for t in qkv), *cu_seqlens, 130, 140)

    with kernels.on_gpu(*capability), torch.no_grad():
        expected = call(second, others)
        rows = [t[0].transpose(0, 1).contiguous() for t in first] if packed else first
        out = flash_attn_varlen(*rows, *lengths, 130, 140) if packed else flash_attn(*rows, is_causal=True)
        assert not torch.equal(out, expected)
        new = [t[0].transpose(0, 1) for t in second] if packed else second
        for kept, values in zip([*rows, *lengths], [*new, *others], strict=True):
            kept.copy_(values)
        kernels.replay()
    assert torch.equal(out, expected)


def test_only_functions_that_a_graph_may_capture_are_called():
    csrc = ROOT / "csrc"
    texts = {path: path.read_text() for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h")}
    runtime = {path: set(re.findall(r"\b(cuda(?!Error_t)[A-Z]\w*)\(", text)) for path, text in texts.items()}
    assert set.union(*runtime.values()) == RUNTIME
    for path in (csrc / "ops").rglob("*cuda*"):
        assert set(re.findall(r"\b(?:c10|at)::cuda::\w+", texts[path])) <= OF_TORCH
        assert not re.search(READS_ON_THE_HOST, texts[path]), path


def test_the_kernels_objects_need_no_other_function_of_the_runtime(built):
    objects = [
        path
        for path in built.parent.rglob("*.o")
        if (ROOT / "csrc/cuda" / path.relative_to(built.parent)).with_suffix(".cu").exists()
    ]
    assert objects
    symbols = subprocess.run(["nm", "-uC", *objects], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r" U (cu[A-Z]\w*|cuda[A-Z]\w*)\(", symbols)) <= RUNTIME
