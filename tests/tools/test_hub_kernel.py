"""The Hugging Face kernel and the conda recipe: the layout, the process's one library, a model through `kernels`."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from paths import ROOT

import flash_attn_ext
from tools.release import hub_kernel, hub_sources

WHEEL = "flash_attn_ext-0.1.0+torch2.13-cp311-cp311-manylinux_2_34_x86_64.whl"

MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
tokens = torch.arange(1, 21).view(2, 10)
mask = torch.ones_like(tokens)
mask[0, :3] = 0
model.set_attn_implementation("eager")
expected = model(tokens, attention_mask=mask).logits[mask.bool()]
model.set_attn_implementation("org/repo", allow_all_kernels=True)
found = model(tokens, attention_mask=mask).logits[mask.bool()]
assert (found - expected).abs().max() < 1e-5
print(sys.modules["flash_attn_ext"].__file__)
"""


@pytest.fixture
def kernel(tmp_path):
    """The repository of a kernel, from a wheel that has this build's files."""
    package = ROOT / "flash_attn_ext"
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        for file in package.rglob("*"):
            if file.suffix in (".py", ".so"):
                archive.write(file, file.relative_to(ROOT))
        archive.writestr("flash_attn_ext-0.1.0.dist-info/METADATA", "")
    assert hub_kernel.main([str(tmp_path / WHEEL), "--out", str(tmp_path / "kernel")]) == 0
    return tmp_path / "kernel"


def run(code, **environment):
    """Runs `code` where the package cannot be imported from the checkout."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=clean | environment)


def test_the_layout_and_the_metadata(kernel):
    variant = kernel / "build/torch213-cxx11-cpu-x86_64-linux"
    assert sorted(path.name for path in variant.iterdir()) == ["__init__.py", "flash_attn_ext", "metadata.json"]
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cpu"}


def test_the_kernel_imports_its_own_library(kernel):
    found = run(f"""
import importlib.util, sys, torch
path = {str(kernel / "build/torch213-cxx11-cpu-x86_64-linux/__init__.py")!r}
spec = importlib.util.spec_from_file_location("a_kernel", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
q = torch.randn(1, 2, 5, 8)
torch.testing.assert_close(module.flash_attn(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
print(sys.modules["flash_attn_ext"].__file__)
""")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(kernel))


def test_a_second_library_with_another_version_is_refused(kernel):
    path = kernel / "build/torch213-cxx11-cpu-x86_64-linux"
    (path / "flash_attn_ext/_version.py").write_text('__version__ = "9.9.9"\n')
    source = (path / "__init__.py").read_text()
    with pytest.raises(ImportError, match=f"has flash_attn_ext 9.9.9, but {flash_attn_ext.__version__} is already"):
        exec(source, {"__file__": str(path / "__init__.py"), "__name__": "a_kernel"})


def test_wheels_for_two_pythons_share_a_variant(tmp_path):
    for tag in ("311", "313"):
        with zipfile.ZipFile(tmp_path / WHEEL.replace("311", tag), "w") as archive:
            archive.writestr(f"flash_attn_ext/_C.cpython-{tag}-x86_64-linux-gnu.so", "")
        folder = hub_kernel.make(tmp_path / WHEEL.replace("311", tag), tmp_path / "out")
    assert len(list((folder / "flash_attn_ext").glob("_C.*.so"))) == 2


def test_a_wheel_without_torchs_version_is_refused():
    with pytest.raises(ValueError, match=r"got the wheel flash_attn_ext-0.1.0-cp311"):
        hub_kernel.variant("flash_attn_ext-0.1.0-cp311-cp311-linux_x86_64.whl")


def test_a_model_of_transformers_loads_the_kernel(kernel):
    pytest.importorskip("kernels", reason="needs the package kernels, in a version that transformers accepts")
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("transformers does not accept the installed version of kernels")
    found = run(MODEL, LOCAL_KERNELS=f"org/repo={kernel}", HF_HUB_OFFLINE="1")
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().splitlines()[-1].startswith(str(kernel))


def test_build_toml_lists_the_sources_of_setup():
    """A new source is missing in a kernel of the Hub until `python -m tools.release.hub_sources --write`."""
    written = (ROOT / "build.toml").read_text()
    assert written == hub_sources.build_toml()
    assert all((ROOT / file).exists() for file in re.findall(r'^  "(.+)",$', written, re.MULTILINE))


def test_sources_for_the_hub_need_no_python():
    """kernel-builder compiles for Python's stable ABI, and pybind11 is not part of it."""
    needs_python = re.compile(r"#include <(pybind11|Python\.h|torch/csrc/(utils/pybind|autograd/python))")
    for _, files in hub_sources.sections().values():
        assert [file for file in files if needs_python.search((ROOT / file).read_text())] == []


def test_both_attention_functions_ignore_the_same_keywords():
    """A kernel of the Hub has no file of the package, so it has a list of its own."""

    def listed(file):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WITHOUT_EFFECT":
                return ast.literal_eval(node.value)

    of_package = listed("flash_attn_ext/integrations/transformers_keywords.py")
    assert of_package
    assert listed("torch-ext/flash_attn_ext/__init__.py") == of_package


def test_the_conda_recipe_is_one(tmp_path):
    """rattler-build's own parser. A build needs conda-forge's packages."""
    rattler_build = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    recipe = (ROOT / "tools/release/conda/recipe.yaml").read_text()
    assert f'version: "{flash_attn_ext.__version__}"' in recipe
    rattler_build.Stage0Recipe.from_yaml(recipe)
