"""tools/flex_tests_of_torch.py, on two files in the manner of torch's tests."""

import subprocess
import sys

from paths import ROOT

FILE = """
import functools
import unittest
from collections import namedtuple

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import flex_attention

supported_platform = unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
Tolerances = namedtuple("Tolerances", ["atol", "rtol"])
S = 2048

class TestOne(unittest.TestCase):
    @supported_platform
    def test_both(self):
        self.assertEqual(S, {length})
        q = torch.randn(1, 1, 40, 8, device="cuda", requires_grad=True)
        attend = functools.partial(flex_attention, score_mod=lambda s, b, h, i, j: s * {factor} + i)
        out, wanted = torch.compile(attend)(q, q, q), attend(q, q, q)
        self.assertIn("FlashAttnExt", out.grad_fn.name())
        self.assertNotIn("FlashAttnExt", wanted.grad_fn.name())
        torch.testing.assert_close(out, wanted * {factor} / 2)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(wanted.sum(), q))

    def test_max_autotune(self):
        raise AssertionError
"""


def test_results_are_counted(tmp_path):
    """The first file passes. In the second file the test expects another `out`."""
    folder = tmp_path / "test" / "inductor"
    folder.mkdir(parents=True)
    (folder / "test_flex_attention.py").write_text(FILE.format(length=512, factor=2))
    (folder / "test_flex_decoding.py").write_text(FILE.format(length=2048, factor=3))
    command = [sys.executable, "-m", "tools.flex_tests_of_torch", str(tmp_path), "--length", "512"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()[-5:]
    assert lines == [
        "1 failed", "1 passed", "2 skipped", "  skipped 2: Skipped: tests the text of torch's Triton kernels",
        "  failed: TestOne::test_both",
    ]  # fmt: skip
