"""The sm90 backward in pairs of blocks, as nvcc's PTX, executed against the dense oracle: docs/design/ptx.md.

The host's launcher is compiled with the same switch, so it starts clusters of two blocks.
"""

import pytest
import torch
from cubins import NVCC
from cuda_host import mutations_sm90
from helpers import check_against_reference, make_qkv
from ptx.kernels import WRONG, Fault, Kernels, Translated
from test_cuda_sm90_pairs import INSTANCE, SOURCE
from test_ptx_sm90 import WAIT

PAIRED = "Backward<In, 256, 256, true, false, true>"
KERNELS = Kernels("90a", "sm90/backward.cuh", (f"backward_kernel<In, 256, 256, true, {PAIRED}>",))
CLUSTER_BARRIER = r"barrier\.cluster\.\w+\.\w+;"
FAULTS = {
    "no barrier of the cluster at the start": (Fault(CLUSTER_BARRIER, "", count=2), "is known|that nobody wrote"),
    "no barrier of the cluster at the end": (
        Fault(CLUSTER_BARRIER, "", r"setmaxnreg\.dec", count=2),
        "a block may end before another block has arrived",
    ),
    "no arrival at the barrier of the cluster": (
        Fault(r"barrier\.cluster\.arrive\.release;", ""),
        "without an arrival",
    ),
    "a mask without the other block": (Fault(r"(multicast::cluster.*), \S+;", r"\1, 1;"), "deadlock|TMA"),
    "a mask of a third block": (Fault(r"(multicast::cluster.*), \S+;", r"\1, 7;"), "not all blocks of the mask 7"),
    "the same half from both blocks": (Fault(r"(multicast::cluster.*\{)%r\d+,", r"\g<1>0,"), WRONG),
    "all arrivals at one block": (
        Fault(r"(mapa\.shared::cluster\.u32\s+\S+ \S+), \S+;", r"\1, 0;"),
        "too many arrivals|nobody has waited|deadlock",
    ),
    "a wrong parity of the producer": (Fault(WAIT, r"\1, 0;", r"multicast"), "deadlock"),
    "a descriptor with the number of the block": (
        Fault(r"and\.b32(\s+\S+, \S+), 167772\d\d;", r"and.b32\1, -1;", count=8),
        WRONG,
    ),
}

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")


def make(seqlen_q, seqlen_k):
    return make_qkv(1, 1, seqlen_q, seqlen_k, 256, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def translated_pairs(built, tmp_path_factory):
    path = mutations_sm90.build_changed(tmp_path_factory.mktemp("pairs"), built, {SOURCE: INSTANCE}, {})
    loaded = Translated(path, (KERNELS,), faults=[fault for fault, _ in FAULTS.values()])
    loaded.num_splits = 1
    return loaded


@pytest.fixture
def pairs(translated_pairs):
    with translated_pairs.running(9, 0) as loaded:
        yield loaded


@pytest.mark.parametrize("options", [{}, {"causal": "lower_right"}, {"window": (100, 9)}], ids=str)
def test_backward(pairs, options):
    launches = pairs.launches()
    check_against_reference(*make(140, 150), **options)
    assert pairs.launches() == launches + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(pairs, fault):
    inputs = make(140, 120)
    pairs.seed_order(1)
    with pairs.finding(FAULTS, fault):
        check_against_reference(*inputs, causal="lower_right")
