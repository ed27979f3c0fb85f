"""The switches of csrc/cuda/sm90/switches.h on the host: with any switch changed, results have the same bits."""

import subprocess

import pytest
import reference
import torch
from cuda_host import library, mutations_sm90
from helpers import make_qkv
from paths import ROOT

from benchmarks.gpu import switches
from flash_attn_ext import flash_attn

SOURCE = "sm90/forward_bfloat16.cu"
# Only the plain kernels have switches, and FLASH_ATTN_EXT_SM90_PERSISTENT changes the kernels with options, too.
INSTANCE = """#include "forward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  if (p.sizes.head_dim > 128) return launch_tiles<__nv_bfloat16, 256, 256, Form::kPlain>(p, {}, workspace, stream);
  return p.sizes.head_dim > 64 ? launch_tiles<__nv_bfloat16, 128, 128, Form::kPlain>(p, {}, workspace, stream)
                               : launch_many_rows<__nv_bfloat16, 64, 64>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
"""


@pytest.fixture(scope="module", params=switches.switches())
def with_one_changed(request, built, tmp_path_factory):
    instance = {SOURCE: f"#define {request.param} {switches.other_value(request.param)}\n{INSTANCE}"}
    return mutations_sm90.build_changed(tmp_path_factory.mktemp(request.param), built, instance, {})


@pytest.fixture(scope="module")
def calls():
    """Partial tiles, tasks and rows without a visible key, odd numbers of tiles, and a hidden NaN. In the last call
    heads lie side by side in memory.
    """
    shapes = ((2, 2, 70, 50, 40, 24), (2, 3, 500, 300, 64), (1, 2, 300, 130, 128), (1, 1, 300, 290, 256))
    inputs = [[t.detach() for t in make_qkv(*shape, dtype=torch.bfloat16)] for shape in shapes]
    inputs[1][2][1, :, 250, 7] = inputs[2][2][:, :, 100, 3] = inputs[3][2][:, :, 90, 3] = torch.nan
    return [*inputs, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[0]]]


def results(path, calls, multiprocessors):
    """out and lse of each call."""
    with library.on_hopper(path, num_splits=1) as loaded, torch.no_grad():
        loaded.c.set_multiprocessors(multiprocessors)
        found = []
        for qkv in calls:
            found += flash_attn(*qkv, causal="lower_right", return_lse=True)
            assert b"sm90::forward_kernel" in loaded.c.last_kernel()
        for options in (dict(softcap=3.0), dict(attn_mask=torch.arange(300)[None, None, None] % 200 < 150)):
            found += flash_attn(*calls[1], causal="lower_right", return_lse=True, **options)
            assert b"sm90::forward_kernel" in loaded.c.last_kernel()
    return found


@pytest.fixture(scope="module")
def expected(built, calls):
    """The results with the defaults."""
    return results(built, calls, 2)


def assert_same_bits(*sides):
    for a, b in zip(*sides, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("multiprocessors", [2, 5])
def test_with_a_switch_changed_results_have_the_same_bits(expected, with_one_changed, calls, multiprocessors):
    assert_same_bits(expected, results(with_one_changed, calls, multiprocessors))


def test_however_many_tasks_a_block_has_results_have_the_same_bits(built, expected, calls):
    one_block = results(built, calls, 1)
    assert_same_bits(one_block, expected)
    assert_same_bits(one_block, results(built, calls, 5))
    hidden = torch.arange(500) < 450  # these rows do not see the NaN
    assert torch.isfinite(one_block[2][:, :, hidden]).all()
    assert one_block[2][1, :, ~hidden, 7].isnan().all()
    exact = reference.attention(*(t[:1].double() for t in calls[1]), causal="lower_right")
    torch.testing.assert_close(one_block[2][:1].double(), exact[0], rtol=0, atol=0.02)


CHOICES = """#include "sm90/schedule.h"
using namespace flash_attn_ext::cuda::sm90;
constexpr flash_attn_ext::Sizes kWide{1, 1, 1, 1, 1, 96, 96}, kNarrow{1, 1, 1, 1, 1, 64, 64};
constexpr flash_attn_ext::Sizes kWider{1, 1, 1, 1, 1, 192, 128};
static_assert(forward_head_dims(kWide, Form::kPlain).qk == (FLASH_ATTN_EXT_SM90_WGMMA_N96 ? 96 : 128));
static_assert(backward_head_dims(kWide, true).qk == (FLASH_ATTN_EXT_SM90_WGMMA_N96 ? 96 : 128));
static_assert(backward_head_dims(kWider, true).qk == (FLASH_ATTN_EXT_SM90_WGMMA_N32 ? 192 : 256));
static_assert(backward_head_dims(kNarrow, true).qk == 64);
static_assert(backward_head_dims(kNarrow, false).qk == (FLASH_ATTN_EXT_SM90_WGMMA_N32 ? 64 : 128));
"""


@pytest.mark.parametrize("off", [None, "FLASH_ATTN_EXT_SM90_WGMMA_N96", "FLASH_ATTN_EXT_SM90_WGMMA_N32"])
def test_a_refused_shape_of_wgmma_costs_a_switch(off):
    """Without it, the kernel of the next larger head dimension runs."""
    command = ["g++", "-std=c++17", "-x", "c++", "-fsyntax-only", f"-I{ROOT / 'csrc' / 'cuda'}"]
    command += [f"-D{off}=0"] if off else []
    subprocess.run([*command, "-"], input=CHOICES, text=True, check=True)
