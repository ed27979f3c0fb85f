"""Which modules an import of the package loads, and the error in a source folder that was not built."""

import ast
import importlib.util
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

import flash_attn_ext

PACKAGE = ROOT / "flash_attn_ext"


def python(*arguments, cwd=None):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_import_loads_no_slow_module():
    """explain imports the counting part of the model when it is called, and the tutorial never.

    torch._dynamo and torch.distributed.tensor take seconds.
    """
    code = """
import sys, torch
slow = ("flash_attn_ext.reference", "matplotlib", "rich", "torch._dynamo", "torch.distributed.tensor")
def loaded():
    return sorted(name for name in sys.modules if name.startswith(slow))
before = loaded()
import flash_attn_ext
print(loaded() == before)
q = torch.zeros(1, 1, 2, 4)
flash_attn_ext.flash_attn(q[0], q[0], q[0])
flash_attn_ext.explain(q, q, q)
print(loaded() == before)
"""
    run = python("-c", code, cwd=PACKAGE.parent)
    assert run.stdout.splitlines() == ["True", "True"], run.stderr


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


# Packages that may be missing. torch.distributed may be missing, too: the first DTensor imports the adapter for it.
# Packages that are optional, and modules that import parts of torch that take seconds.
OPTIONAL = ("rich", "matplotlib", "flash_attn_ext.distributed", "flash_attn_ext.flex.higher_order")


def module_name(path, package):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(node, module, is_package):
    """The modules of an import statement or of a call of importlib.import_module, by their full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.split(".")[: None if is_package and node.level == 1 else 1 - node.level - (not is_package)]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [node.args[0].value if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0])]
    return []


def imports_of(package):
    """({module: the package's modules that its loading imports}, [(module, a module that a function imports)])."""
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    at_load, in_functions = {}, []
    for module, path in files.items():
        is_package, at_load[module] = path.name == "__init__.py", set()
        tree = ast.parse(path.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
        inside = {id(child) for function in functions for child in ast.walk(function)}
        for node in ast.walk(tree):
            for name in imported_by(node, module, is_package):
                if id(node) not in inside:
                    at_load[module] |= {name} & files.keys() - {module}
                elif isinstance(node, ast.Call) or not name.startswith(OPTIONAL):  # torch.compile traces no call
                    in_functions.append((module, name))
    return at_load, in_functions


def cycle_in(graph):
    """The modules of one circle of imports, in order; None without one. A package's __init__ may import its modules."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        for other in sorted(graph[module]):
            if (found := visit(other)) is not None:
                return found
        done.add(path.pop())
        return None

    return next((found for found in map(visit, sorted(graph)) if found is not None), None)


def test_the_package_imports_in_no_circle_and_in_no_function():
    at_load, in_functions = imports_of(PACKAGE)
    assert len(at_load) > 50
    assert at_load["flash_attn_ext.kvcache"]
    assert in_functions == []
    assert cycle_in({m: {i for i in imported if not m.startswith(i + ".")} for m, imported in at_load.items()}) is None


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("from .b import f", {"flash_attn_ext.b"}),
        ("from . import b", {"flash_attn_ext.b"}),
        ("from flash_attn_ext.b import f", {"flash_attn_ext.b"}),
        ("import flash_attn_ext.b", {"flash_attn_ext.b"}),
        ("from .sub import c", {"flash_attn_ext.sub", "flash_attn_ext.sub.c"}),
    ],
)
def test_the_test_above_sees_every_form_of_import(tmp_path, text, imported):
    package = tmp_path / "flash_attn_ext"
    (package / "sub").mkdir(parents=True)
    files = {
        "__init__.py": "from . import a", "a.py": text,
        "b.py": "def f():\n    from . import a\n    import rich\n    importlib.import_module('rich')",
        "sub/__init__.py": "from .c import x\nfrom ..b import f", "sub/c.py": "from .. import a",
    }  # fmt: skip
    for name, content in files.items():
        (package / name).write_text(content)
    at_load, in_functions = imports_of(package)
    outside = {"flash_attn_ext"}  # every module of a package loads the package first
    assert at_load["flash_attn_ext.a"] - outside == imported
    assert at_load["flash_attn_ext.sub"] - outside == {"flash_attn_ext.sub.c", "flash_attn_ext.b"}
    assert at_load["flash_attn_ext.sub.c"] - outside == {"flash_attn_ext.a"}
    assert {module for module, _ in in_functions} == {"flash_attn_ext.b"}
    assert sorted(name for _, name in in_functions) == ["flash_attn_ext", "flash_attn_ext.a", "rich"]


def test_a_circle_is_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
