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
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flash_attn_ext import flash_attn, flash_attn_interface, flash_attn_varlen, flash_attn_with_kvcache, indexer_topk

FAULTS = {
    "correct_launch": "",
    "host_reads_an_input": "the replay used an old input",
    "pointer_to_the_hosts_stack": "out of bounds: .* reads 4 bytes at .* of unknown memory",
}
# Functions that the launchers may call. None of them allocates device memory or waits for the GPU.
RUNTIME = {
    "cudaLaunchKernelEx", "cudaMemsetAsync", "cudaFuncSetAttribute", "cudaGetDevice", "cudaSetDevice",
    "cudaDeviceGetAttribute", "cudaGetDriverEntryPointByVersion",
}  # fmt: skip
# The same for the code that sees torch.
OF_TORCH = {"c10::cuda::CUDAGuard", "c10::cuda::getCurrentCUDAStream"}
READS_ON_THE_HOST = r"\.item(<|\()|_local_scalar_dense|\.cpu\(\)|ynchronize|cudaMalloc|cudaMemcpy"
CALL_OF_RUNTIME = r"\b(cuda(?!Error_t)[A-Z]\w*)\("


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
    new_lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 130], [0, 130, 140])]

    def call(qkv, cu_seqlens):
        if not packed:
            return flash_attn(*qkv, is_causal=True)
        return flash_attn_varlen(*(t[0].transpose(0, 1).contiguous() for t in qkv), *cu_seqlens, 130, 140)

    with kernels.on_gpu(*capability), torch.no_grad():
        expected = call(second, new_lengths)
        rows = [t[0].transpose(0, 1).contiguous() for t in first] if packed else first
        out = flash_attn_varlen(*rows, *lengths, 130, 140) if packed else flash_attn(*rows, is_causal=True)
        assert not torch.equal(out, expected)
        new = [t[0].transpose(0, 1) for t in second] if packed else second
        for kept, values in zip([*rows, *lengths], [*new, *new_lengths], strict=True):
            kept.copy_(values)
        kernels.replay()
    assert torch.equal(out, expected)


def test_only_functions_that_a_graph_may_capture_are_called():
    csrc = ROOT / "csrc"
    texts = {path: path.read_text() for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h")}
    runtime = {path: set(re.findall(CALL_OF_RUNTIME, text)) for path, text in texts.items()}
    assert set.union(*runtime.values()) == RUNTIME
    for path in (csrc / "ops").rglob("*cuda*"):
        assert set(re.findall(r"\b(?:c10|at)::cuda::\w+", texts[path])) <= OF_TORCH
        assert not re.search(READS_ON_THE_HOST, texts[path]), path


@pytest.mark.parametrize("fault", ["cudaMalloc(&p, 4)", "cudaStreamSynchronize(s)", "cudaMemcpy(to, from, 4, kind)"])
def test_a_call_that_a_graph_cannot_capture_is_found(fault):
    assert not set(re.findall(CALL_OF_RUNTIME, f"return {fault};")) <= RUNTIME
    assert re.search(READS_ON_THE_HOST, f"at::cuda::{fault};")


def test_the_kernels_objects_need_no_other_function_of_the_runtime(built):
    objects = [
        path
        for path in built.parent.rglob("*.o")
        if (ROOT / "csrc/cuda" / path.relative_to(built.parent)).with_suffix(".cu").exists()
    ]
    assert objects
    symbols = subprocess.run(["nm", "-uC", *objects], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r" U (cu[A-Z]\w*|cuda[A-Z]\w*)\(", symbols)) <= RUNTIME


def on_cuda(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def numbers(*shape):
    return on_cuda(*shape, dtype=torch.int32)


def made(options):
    """Tensors exist only while a call is traced, so each option is a function that makes its tensor."""
    return {name: make() for name, make in options.items()}


def dense(**options):
    return lambda: flash_attn(*(on_cuda(2, 4, 64, 64) for _ in range(3)), **made(options))


def packed(function=flash_attn_varlen, **options):
    def call():
        rows = (on_cuda(100, 4, 64) for _ in range(3))
        return function(*rows, numbers(3), numbers(3), 50, 50, **made(options))

    return call


def cached(cache=(2, 128, 2, 64), function=flash_attn_with_kvcache, **options):
    def call():
        caches = (on_cuda(*cache) for _ in range(2))
        return function(on_cuda(2, 1, 4, 64), *caches, cache_seqlens=numbers(2), **made(options))

    return call


def a_row():
    return on_cuda(2, 1, 2, 64)


def a_table():
    return on_cuda(128, 32)


# Calls as users write them, of tensors on CUDA.
CALLS = {
    "dense": dense(is_causal=lambda: True),
    "mask": dense(attn_mask=lambda: on_cuda(64, 64, dtype=torch.bool), window=lambda: (3, 4)),
    "key_mask": dense(key_mask=lambda: on_cuda(2, 64, dtype=torch.bool)),
    "dropout": dense(dropout_p=lambda: 0.1),
    "alibi_slopes": dense(alibi_slopes=lambda: on_cuda(4, dtype=torch.float32)),
    "sink": dense(sink=lambda: on_cuda(4, dtype=torch.float32)),
    "key_indices": dense(key_indices=lambda: numbers(2, 4, 64, 8)),
    "packed": packed(),
    "packed, used keys": packed(seqused_k=lambda: numbers(2)),
    "packed, as flash-attention": packed(flash_attn_interface.flash_attn_varlen_func),
    "cache": cached(),
    "cache, appended": cached(k=a_row, v=a_row),
    "cache, rotated": cached(k=a_row, v=a_row, rotary_cos=a_table, rotary_sin=a_table),
    "cache, rows": cached((4, 128, 2, 64), cache_batch_idx=lambda: numbers(2)),
    "pages": cached((16, 16, 2, 64), block_table=lambda: numbers(2, 8)),
    "pages, rows": cached((16, 16, 2, 64), block_table=lambda: numbers(4, 8), cache_batch_idx=lambda: numbers(2)),
    "cache, as flash-attention": cached(function=flash_attn_interface.flash_attn_with_kvcache),
    "indexer": lambda: indexer_topk(on_cuda(1, 4, 64, 32), on_cuda(1, 64, 32), on_cuda(1, 64, 4), 8),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_reads_a_tensor_on_the_host_before_its_operator(call):
    """Fake tensors of CUDA have no values: reading one raises an error."""
    with FakeTensorMode(), torch.no_grad():
        result = CALLS[call]()
        for t in result if isinstance(result, tuple) else (result,):
            assert t.device.type == "cuda"


def test_a_call_that_reads_a_tensor_on_the_host_is_found():
    with FakeTensorMode(), torch.no_grad(), pytest.raises(DataDependentOutputException):
        flash_attn_varlen(*(on_cuda(100, 4, 64) for _ in range(3)), numbers(3), numbers(3), numbers(1).item(), 50)
