"""Which modules an import of the package loads, and the error in a source folder that was not built."""

import importlib.util
import shutil
import subprocess
import sys

from paths import ROOT

import flash_attn_ext

PACKAGE = ROOT / "flash_attn_ext"


def python(*arguments, cwd=None):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_import_loads_neither_the_tutorial_nor_the_model():
    """explain takes the counting part of the model when it is called, and the tutorial never."""
    code = """
import sys, torch
def loaded():
    return sorted(name for name in sys.modules if name.startswith(("flash_attn_ext.reference", "matplotlib", "rich")))
import flash_attn_ext
print(loaded())
q = torch.zeros(1, 1, 2, 4)
flash_attn_ext.explain(q, q, q)
print(loaded())
"""
    run = python("-c", code, cwd=PACKAGE.parent)
    assert run.stdout.splitlines() == ["[]", "[]"], run.stderr


def test_the_function_explain_hides_no_module():
    assert callable(flash_attn_ext.explain)
    assert importlib.util.find_spec("flash_attn_ext.explain") is None


def unbuilt(tmp_path):
    """A folder with the package's sources and nothing compiled."""
    ignored = shutil.ignore_patterns("_C*", "__pycache__", "figures")
    shutil.copytree(PACKAGE, tmp_path / "flash_attn_ext", ignore=ignored)
    return tmp_path


def test_the_model_runs_in_a_clone_that_was_not_built(tmp_path):
    command = ("-m", "flash_attn_ext.iomodel", "predict", "--B=1", "--H=1", "--S=128", "--D=16")
    run = python(*command, cwd=unbuilt(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "FlashAttention-2" in run.stdout


def test_the_rest_says_that_the_source_folder_hides_the_package(tmp_path):
    code = """
import flash_attn_ext
print(flash_attn_ext.__version__)
try:
    flash_attn_ext.nothing
except AttributeError as error:
    print(error)
for line in ("flash_attn_ext.flash_attn", "from flash_attn_ext import explain", "import flash_attn_ext.functional"):
    try:
        exec(line)
    except ImportError as error:
        print(error)
"""
    run = python("-c", code, cwd=unbuilt(tmp_path))
    version, attribute, *messages = run.stdout.splitlines()
    assert version
    assert attribute == "module 'flash_attn_ext' has no attribute 'nothing'"
    assert len(messages) == 3, run.stderr
    for message in messages:
        assert f"(_C) is not in {tmp_path / 'flash_attn_ext'}, a source folder that was not built" in message
        assert f"Python looks into {tmp_path} first: run in another directory" in message
