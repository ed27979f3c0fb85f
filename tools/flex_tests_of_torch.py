"""Runs torch's tests of FlexAttention on a CPU with our flex_attention.

    python -m tools.flex_tests_of_torch PYTORCH [--compile] [--length 256] [-- pytest arguments]

PYTORCH is a checkout of pytorch, or a folder with test/inductor/test_flex_attention.py and test_flex_decoding.py. The
checkout need not be built. The program writes copies of these two files to a temporary folder and changes them there:

  tensors are on the CPU, with gradients, where the file says "cuda" or tests only the forward on a CPU
  ``torch.compile(f)`` runs f with our flex_attention. With --compile it is torch.compile itself, and the function that
  it compiles calls our flex_attention
  a call of flex_attention outside of ``torch.compile`` is torch's own: its kernel in plain operators is the reference

Some tests do not apply: tests of Triton's or inductor's generated code, of several GPUs, and of error messages of
torch's kernels. They are skipped, with the reason. The last lines count results and reasons. Install psutil:
torch skips 750 tests without it.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILES = ("test_flex_attention.py", "test_flex_decoding.py")

# {regular expression for names of tests: why they do not apply}
SKIPPED = {
    "device_cuda_1|on_the_same_device|mixed_device|wrong_device|block_mask_device|cuda_graphable": "needs a GPU",
    "max_autotune|max-autotune|kernel_options_argument|force_write_lse|epilogue_fused|inputs_are_realized|"
    "logsumexp_only_return|cant_lower|reduction_unrolled|float32_matmul_precision|multiple_mask_calls|test_backend_|"
    "divisibility_guards|freezes_layout|strided_backwards|attention_logging": (
        "tests the text of torch's Triton kernels"
    ),
    "fw_bw_graph_correctness|subgraph_respect|recompile_changed|free_symbol_dynamic|mask_mod_combiners|"
    "automatic_dynamic|bug_dynamic_batch": (
        "tests the graph of torch.compile"
    ),
    "selective_ac": "computes again outside of the compiled function",
    "cpu_error_message|validate_cpu_dtype|bw_decoding_fails|invalid_block_size|symmetric_bias|zero_length_sequence|"
    "none_q_indices|small_embedding_size": (
        "tests calls that torch's kernels refuse and ours run"
    ),
    "mixed_dtypes(?!_fails|_eager)|mixed_dtype_backwards(?!_eager)": "float8 keys of 16-bit queries: ours refuse them",
    "return_max|return_aux__": "the maximum of each row: ours refuse it, as torch's do on a CPU",
    "no_q_info_compile_False": "calls torch's kernel alone",
    # torch adds gradients of 16-bit tensors in 16 bits. For the gate its errors are 0.2 to 0.6, and ours 0.005. The
    # gradient of a bias of rows is 0: torch's has rms 0.019, also for float64 queries, and ours 0.003.
    "head_specific_gate.*bfloat16|distinct_biases.*float16": "its reference is less exact than ours",
    # The exponential of 16-bit dtypes has 18.5 bits: an lse near 1 is exact to 3e-6. The test allows 20 times 6e-8.
    "function_composition.*bfloat16": "compares an lse of bfloat16 at float32's tolerance",
    "vs_sequence_lengths|mixed_dtypes_fails|deprecation_warnings|sliced_blockmask": "tests the text of torch's errors",
    "getitem|block_mask_viz|block_mask_attributes|compiling_create_block_mask|test_pytree_": (
        "tests torch's BlockMask alone"
    ),
}  # fmt: skip

# Replacements in each copy, in this order. If a version of torch has other text, they change nothing.
REPLACED = (
    (r"test_inference_only = True", "test_inference_only = False"),
    (r"(['\"])cuda(:\d)?\1", r"\1cpu\1"),
    (r"\.cuda\(\)", ".cpu()"),
    (r"^(supported_platform|supports_learnable_bias|running_on_a100_only) = ", r"_unused = "),
    (r"\btorch\.compile\(", "_torch_compile("),
    (r"^@supports_learnable_bias$", ""),
    (r"^ *@skip_on_cpu$", ""),
    (r"SKIP_UT_ON_CPU = True", "SKIP_UT_ON_CPU = False"),
    # How often it compiled.
    (r"^( *)self\.assertEqual\((torch\._dynamo\.utils\.counters\[.frames.\]|backend\.frame_count).*$", r"\1pass"),
)
PRELUDE = """
from tools.flex_tests_of_torch import compiled as _torch_compile, flex_attention, pages_on_cpu
PagedAttention = pages_on_cpu(PagedAttention)
supported_platform = running_on_a100_only = lambda test: test
"""

# Tests that learn captured tensors. torch's eager kernel has their gradients only after a trace, which is slow.
LEARNED = "TestLearnableBiases|learnable_bias|bias_req_grad|captured_score_mod"

_uses_compiler = False
_is_learned = False
_inside = 0  # the number of running calls of ``compiled`` functions


def flex_attention(*arguments: Any, **options: Any) -> Any:
    """Runs our flex_attention inside of a compiled function, and torch's elsewhere."""
    import torch

    if _inside or torch.compiler.is_dynamo_compiling():
        import flash_attn_ext

        return flash_attn_ext.flex_attention(*arguments, **options)
    return _torchs()(*arguments, **options)


def compiled(function: Any = None, **options: Any) -> Any:
    """Replaces torch.compile in the test files."""
    import torch

    if function is None:
        return lambda function: compiled(function, **options)
    if _uses_compiler:
        return torch.compile(function, **options)

    def run(*arguments: Any, **keywords: Any) -> Any:
        global _inside
        _inside += 1
        try:
            return function(*arguments, **keywords)
        finally:
            _inside -= 1

    return run


def _torchs() -> Any:
    """Returns torch's flex_attention, changed so that its eager kernel runs on a CPU with gradients."""
    import torch.nn.attention.flex_attention as module

    module._validate_device = lambda *_: None  # type: ignore[assignment]
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = not _is_learned
    return module.flex_attention


def pages_on_cpu(paged_attention: Any) -> Any:
    """Returns torch's PagedAttention for a CPU.

    Newer versions need positions for each sequence; older files have one row.
    """

    class PagedAttention(paged_attention):
        def __init__(self, *arguments: Any, device: str = "cpu", **keywords: Any) -> None:
            super().__init__(*arguments, device=device, **keywords)

        def assign(self, batch_idx: Any, input_pos: Any, *arguments: Any) -> None:
            super().assign(batch_idx, input_pos.expand(batch_idx.shape[0], input_pos.shape[-1]), *arguments)

    return PagedAttention


def for_cpu(text: str, length: int) -> str:
    """``text`` of a file of tests, changed as described above, with S = ``length`` in place of 2048."""
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    text = re.sub(r"^S = 2048$", f"S = {length}", text, flags=re.MULTILINE)
    # After the imports, and after the decorator that the file makes itself.
    return re.sub(r"^Tolerances = ", PRELUDE + "Tolerances = ", text, count=1, flags=re.MULTILINE)


def reason_to_skip(name: str) -> str | None:
    return next((reason for pattern, reason in SKIPPED.items() if re.search(pattern, name)), None)


class _Report:
    """A plugin of pytest: skips tests, and counts results."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest

        for item in items:
            if reason := reason_to_skip(item.name):
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_setup(self, item: Any) -> None:
        global _is_learned
        _is_learned = re.search(LEARNED, item.nodeid) is not None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome == "skipped":
            self.counts[report.outcome] += 1
        if report.outcome == "skipped":
            self.skipped[str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "expected failure"] += 1
        if report.outcome == "failed":
            self.failed.append(report.nodeid.partition("::")[2])

    def summary(self) -> str:
        lines = [f"{count} {outcome}" for outcome, count in sorted(self.counts.items())]
        lines += [f"  skipped {count}: {reason}" for reason, count in self.skipped.most_common()]
        return "\n".join(lines + [f"  failed: {name}" for name in self.failed])


def main() -> int:
    global _uses_compiler
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytorch", type=Path)
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of an eager call of ours")
    parser.add_argument(
        "--length", type=int, default=256, help="of the files' tensors, a multiple of 256; torch has 2048"
    )
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments, for_pytest = parser.parse_args(given[:end]), given[end + 1 :]
    import pytest

    _uses_compiler = arguments.compile
    report = _Report()
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            text = (arguments.pytorch / "test" / "inductor" / name).read_text()
            length = 2048 if "decoding" in name else arguments.length  # decoding has few queries
            (Path(folder) / name).write_text(for_cpu(text, length))
        paths = [str(Path(folder) / name) for name in FILES]
        status = pytest.main(
            [
                *("-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
                *(f"--rootdir={folder}", "--import-mode=importlib", *paths, *for_pytest),
            ],
            plugins=[report],
        )
    print(report.summary())
    return int(status)


if __name__ == "__main__":
    # Under its own name, as the files import it.
    from tools import flex_tests_of_torch

    sys.exit(flex_tests_of_torch.main())
