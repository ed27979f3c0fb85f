"""setup.py: what is asked for and impossible is a loud error; and the README's Python runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn_ext

ROOT = Path(__file__).parent.parent


def run_setup(prelude="", **environment):
    """The end of what `setup.py --version` says, with `prelude` run first."""
    program = f"import runpy, sys, torch\n{prelude}\nsys.argv = ['setup.py', '--version']\nrunpy.run_path('setup.py')"
    clean = {k: v for k, v in os.environ.items() if k not in ("FLASH_ATTN_EXT_CUDA", "CUDA_HOME", "CUDA_PATH")}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True
    )
    return run.returncode, (run.stdout + run.stderr).strip().splitlines()[-1]


CPU_TORCH, CUDA_TORCH = "torch.version.cuda = None", "torch.version.cuda = '13.0'"


def test_cuda_asked_for_with_a_cpu_build_of_torch():
    code, message = run_setup(CPU_TORCH, FLASH_ATTN_EXT_CUDA="1")
    assert code != 0
    assert re.search(r"FLASH_ATTN_EXT_CUDA=1, but torch .* is a CPU build; install a CUDA build of torch", message)


@pytest.mark.parametrize("asked", ["", "1"])
def test_no_toolkit_is_an_error_and_never_a_silent_cpu_build(asked):
    code, message = run_setup(CUDA_TORCH, FLASH_ATTN_EXT_CUDA=asked, CUDA_HOME="/nowhere")
    assert code != 0
    assert "no CUDA toolkit" in message
    assert "/nowhere; set CUDA_HOME, or FLASH_ATTN_EXT_CUDA=0" in message


def test_cuda_left_out_on_purpose_or_with_a_cpu_build_of_torch():
    assert run_setup(CUDA_TORCH, FLASH_ATTN_EXT_CUDA="0", CUDA_HOME="/nowhere") == (0, "0.1.0")
    assert run_setup(CPU_TORCH) == (0, "0.1.0")


def test_nonsense_is_refused():
    code, message = run_setup(FLASH_ATTN_EXT_CUDA="yes")
    assert code != 0
    assert "FLASH_ATTN_EXT_CUDA: got 'yes'; allowed: 0, 1 or unset" in message


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (None, "compute_80,sm_80,sm_90a"),
        ("9.0", "sm_90"),
        ("8.0;9.0a+PTX", "sm_80,compute_90a,sm_90a"),
        ("Ampere", "sm_80,compute_86,sm_86"),
    ],
)
def test_the_cuda_half_knows_for_which_gpus_it_is_built(tmp_path, asked, code):
    """What nvcc is told reaches csrc/cuda/gpu_code.cpp: the -gencode options and the macro name the same."""
    for name in ("bin/nvcc", "include/cuda_runtime.h"):  # as much of a toolkit as setup.py looks for
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    show = (
        f"{CUDA_TORCH}\nimport setuptools\nfrom torch.utils import cpp_extension\n"
        "def setup(ext_modules, **_):\n"
        "    flags = ext_modules[0].extra_compile_args\n"
        "    options = cpp_extension._get_cuda_arch_flags(flags['nvcc'])\n"
        "    print([f for f in flags['cxx'] if 'GPU_CODE' in f], [o.rsplit('code=')[-1] for o in options])\n"
        "setuptools.setup = setup\n"
    )
    environment = {} if asked is None else {"TORCH_CUDA_ARCH_LIST": asked}
    result = run_setup(show, FLASH_ATTN_EXT_CUDA="1", CUDA_HOME=str(tmp_path), **environment)
    assert result == (0, f"['-DFLASH_ATTN_EXT_GPU_CODE={code}'] {code.split(',')}")


def test_build_info():
    info = flash_attn_ext.build_info()
    assert info["openmp"] is True
    assert info["max_head_dim"] == 512
    assert set(info) == {"torch", "compiler", "cuda", "openmp", "max_head_dim"}


def test_the_readmes_python():
    """All blocks in order, in one process, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    setup = "import torch; q = k = v = torch.randn(1, 2, 16, 8)\n"
    run = subprocess.run([sys.executable, "-c", setup + "\n".join(blocks)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "ReplacedAttention" in run.stdout


def test_a_broken_extension_says_what_to_do(tmp_path):
    """The extension of another torch: ImportError names the command."""
    package = tmp_path / "flash_attn_ext"
    package.mkdir()
    for source in (ROOT / "flash_attn_ext").glob("*.py"):
        (package / source.name).write_text(source.read_text())
    (package / "_C.py").write_text("raise ImportError('undefined symbol: _ZN3c104impl')")
    run = subprocess.run([sys.executable, "-c", "import flash_attn_ext"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    assert "ImportError: flash_attn_ext's compiled half cannot be loaded (undefined symbol" in run.stderr
    assert "pip install --no-build-isolation ." in run.stderr
