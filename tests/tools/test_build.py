"""setup.py and the build backend: errors for impossible requests, the contents of an sdist, and the import."""

import contextlib
import importlib.machinery
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import _distutils_hack
import pytest
import setuptools
import torch
from paths import ROOT
from torch.utils import cpp_extension

import flash_attn_ext
from flash_attn_ext import _ops


def run_setup(prelude="", **environment):
    """Runs `prelude` and then `setup.py --version`. Returns the exit status and the last printed line."""
    clean = {k: v for k, v in os.environ.items() if k not in ("FLASH_ATTN_EXT_CUDA", "CUDA_HOME", "CUDA_PATH")}
    said, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        for module, name in ((torch, "__version__"), (torch.version, "cuda"), (cpp_extension, "CUDA_HOME")):
            patch.setattr(module, name, getattr(module, name))  # to be as before afterwards, whatever changes it
        patch.setattr(setuptools, "setup", setuptools.setup)
        patch.setattr(os, "environ", clean | environment)
        patch.setattr(sys, "argv", ["setup.py", "--version"])
        patch.chdir(ROOT)
        exec(prelude, {"torch": torch})
        try:
            runpy.run_path("setup.py")
        except SystemExit as error:
            code = 1
            print(error)
    return code, said.getvalue().strip().splitlines()[-1]


def test_an_editable_build_keeps_its_objects(monkeypatch):
    """After an edit, `make` compiles only the files that changed."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # setup.py changes it
    monkeypatch.chdir(ROOT)
    setup = runpy.run_path("setup.py")
    distribution = setuptools.Distribution({"ext_modules": given["ext_modules"], "cmdclass": given["cmdclass"]})
    distribution.get_command_obj("build").build_temp = "/elsewhere"  # as setuptools' editable_wheel does
    command = distribution.get_command_obj("build_ext")
    command.ensure_finalized()
    assert command.build_temp == setup["OBJECTS"]


def test_groups_with_different_flags_compile_in_one_run_of_ninja(tmp_path, monkeypatch):
    """The first group begins first. MAX_JOBS is the number of files that compile at a time."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.setenv("PATH", os.environ["PATH"])  # setup.py changes it
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.chdir(ROOT)
    setup = runpy.run_path("setup.py")
    runs, run_ninja = [], cpp_extension._run_ninja_build

    def run(folder, *args, **options):
        runs.append(folder)
        run_ninja(folder, *args, **options)

    monkeypatch.setattr(cpp_extension, "_run_ninja_build", run)
    with setup["one_run_of_ninja"]():
        for flag in ("-O1", "-O3"):  # as torch's compile() does
            rule = f"post_cflags = {flag}\nrule compile\n  command = echo $post_cflags $out >> log; touch $out\n"
            (tmp_path / "build.ninja").write_text(f"{rule}build x{flag}.o: compile\nbuild y{flag}.o: compile\n")
            cpp_extension._run_ninja_build(str(tmp_path), False, error_prefix="Error")
        assert not (tmp_path / "log").exists()
    assert runs == [str(tmp_path)]
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["-O1 x-O1.o", "-O1 y-O1.o", "-O3 x-O3.o", "-O3 y-O3.o"]
    assert cpp_extension._run_ninja_build is run


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
    """nvcc's -gencode options and the macro for csrc/cuda/gpu_code.cpp name the same GPUs."""
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


@pytest.mark.parametrize(
    ("asked", "of_tier", "ptx_of_sm80"),
    [
        (None, {"sm75": ["sm_90a"], "sm80": ["compute_80", "sm_80", "sm_90a"], "sm90": ["sm_90a"]}, "80"),
        ("7.5;8.0+PTX", {"sm75": ["sm_75"], "sm80": ["compute_80", "sm_75", "sm_80"], "sm90": ["sm_80"]}, "75 80"),
        ("9.0", {"sm75": ["sm_90"], "sm80": ["sm_90"], "sm90": ["sm_90"]}, "90"),
        (
            "9.0;9.0a+PTX",
            {"sm75": ["sm_90a"], "sm80": ["compute_90a", "sm_90", "sm_90a"], "sm90": ["compute_90a", "sm_90a"]},
            "90 90a",
        ),
        ("8.6;9.0a;12.0", {"sm80": ["sm_120", "sm_86", "sm_90a"], "sm90": ["sm_90a"]}, "86"),
        ("9.0a;10.0", {"sm80": ["sm_100", "sm_90a"], "sm90": ["sm_90a"]}, "100 90a"),
    ],
)
def test_nvcc_compiles_a_tier_for_the_gpus_on_which_it_runs(tmp_path, monkeypatch, asked, of_tier, ptx_of_sm80):
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    calls, given = [], {}

    def build(command, extension):  # in place of torch's and setuptools' part
        objects = command.compiler.compile(sorted(extension.sources), extra_postargs=extension.extra_compile_args)
        assert sorted(objects) == sorted(extension.sources)

    def compile_all(sources, extra_postargs):
        calls.append((sources, cpp_extension._get_cuda_arch_flags(extra_postargs["nvcc"]) or extra_postargs["nvcc"]))
        return sources

    monkeypatch.setattr(cpp_extension.BuildExtension, "build_extension", build, raising=False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.setattr(os, "environ", {**os.environ, "FLASH_ATTN_EXT_CUDA": "1", "CUDA_HOME": str(tmp_path)})
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    if asked:
        os.environ["TORCH_CUDA_ARCH_LIST"] = asked
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    command = given["cmdclass"]["build_ext"](setuptools.Distribution({"ext_modules": given["ext_modules"]}))
    command.compiler = types.SimpleNamespace(compile=compile_all)
    command.build_extension(given["ext_modules"][0])

    compiled, ptx = {}, {}
    for sources, options in calls:
        assert sources == sorted(sources, key=given["ext_modules"][0].sources.index)  # long ones first
        codes = sorted(option.rsplit("code=")[-1] for option in options if "gencode" in option)
        for source in sources:
            if source.endswith(".cu"):
                path = Path(source)
                in_unit = path.parent.name == "translation_units"
                tier = path.stem.partition("_")[0] if in_unit else path.parent.name
                assert compiled.setdefault(tier, codes) == codes, source
                ptx[tier] = " ".join(sorted(set(re.findall(r"arch=compute_(\w+)", " ".join(options)))))
    assert {tier: compiled[tier] for tier in of_tier} == of_tier
    assert compiled["simt"] == compiled["sm80"]
    assert ptx["simt"] == ptx["sm80"] == ptx_of_sm80


def test_build_info():
    info = flash_attn_ext.build_info()
    assert info["openmp"] is True
    assert info["max_head_dim"] == 1024
    assert set(info) == {"torch", "compiler", "cuda", "openmp", "max_head_dim"}


def test_torch_too_old_is_an_error():
    code, message = run_setup(f"{CPU_TORCH}\ntorch.__version__ = '2.10.1+cpu'")
    assert (code, message) == (1, "flash_attn_ext needs torch 2.11 or later; installed is 2.10.1+cpu")


@pytest.mark.parametrize(
    ("asked", "version"), [({}, "0.1.0"), ({"FLASH_ATTN_EXT_LOCAL_VERSION": "1"}, "0.1.0+torch2.37")]
)
def test_a_wheel_requires_the_torch_that_it_was_built_for(asked, version):
    show = (
        f"{CPU_TORCH}\nimport setuptools\ntorch.__version__ = '2.37.1+cpu'\n"
        "setuptools.setup = lambda version, install_requires, **_: print(version, install_requires)\n"
    )
    assert run_setup(show, **asked) == (0, f"{version} ['torch==2.37.*']")


def test_the_version_is_one():
    assert run_setup(CPU_TORCH) == (0, flash_attn_ext.__version__)
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == flash_attn_ext.__version__


def test_an_sdist_needs_no_torch_and_holds_every_source(tmp_path):
    program = (
        "import runpy, sys\nsys.modules['torch'] = None\n"
        f"folder = {str(tmp_path)!r}\n"
        "sys.argv = ['setup.py', '-q', 'egg_info', '--egg-base', folder, 'sdist', '-d', folder]\n"
        "runpy.run_path('setup.py')"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = (".github", "csrc", "flash_attn_ext", "tests", "tools", "examples", "benchmarks", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".pyc", ".so")}
    assert len([name for name in wanted if name.endswith(".cu")]) > 10
    assert wanted <= held
    assert {"LICENSE", "Makefile", "pyproject.toml", "setup.py"} <= held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_a_wheel_is_tested_without_the_sources(tmp_path):
    """The wheel's tests need only tests/ and pyproject.toml."""
    tested = re.findall(r"tests/\w+/\w+\.py", (ROOT / "tools" / "wheel.sh").read_text())
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tested]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert tested
    assert done.returncode == 0, done.stdout


def run_backend(tmp_path, *site_folders):
    """Runs the build backend with torch in these folders only. Returns the status, and torch's file or the error."""
    environment = tmp_path / "build_environment"
    environment.mkdir()
    for module in (setuptools, _distutils_hack):
        folder = Path(module.__file__).parent
        (environment / folder.name).symlink_to(folder)
    program = (
        f"import site, sys\nsys.path[:0] = [{str(environment)!r}, {str(ROOT / 'tools')!r}]\n"
        f"site.getsitepackages = lambda: {[str(folder) for folder in site_folders]}\n"
        f"site.getusersitepackages = lambda: '/nowhere'\n"
        "import build_backend\nbuild_backend.require_torch()\nimport torch\nprint(torch.__file__)"
    )
    command = [sys.executable, "-S", "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    return run.returncode, (run.stdout + run.stderr).strip()


def test_an_isolated_build_takes_the_torch_that_is_installed(tmp_path):
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").touch()
    assert run_backend(tmp_path, tmp_path / "site") == (0, str(tmp_path / "site" / "torch" / "__init__.py"))


def test_an_isolated_build_without_torch_stops_with_advice(tmp_path):
    code, message = run_backend(tmp_path, tmp_path)
    assert code == 1
    assert message.startswith("flash_attn_ext is compiled against torch, and ")
    assert "pip install torch" in message
    assert len(message.splitlines()) == 1


def import_package(tmp_path, extension, content):
    """Imports the package with another compiled half. Returns the last line of stderr."""
    package = tmp_path / "flash_attn_ext"
    package.mkdir()
    for source in (ROOT / "flash_attn_ext").glob("*.py"):
        (package / source.name).write_text(source.read_text())
    (package / extension).write_bytes(content)
    run = subprocess.run([sys.executable, "-c", "import flash_attn_ext"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    return run.stderr.strip().splitlines()[-1]


EXTENSION = "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]


def test_the_extension_of_another_torch_is_refused_with_both_versions(tmp_path):
    message = import_package(tmp_path, EXTENSION, b"\0flash_attn_ext was built for torch 2.3.1\0")
    versions = f"flash_attn_ext was built for torch 2.3.1, but torch {torch.__version__} is installed"
    assert message.startswith(f"ImportError: {versions}; build it again")


def test_an_extension_that_does_not_load_names_its_torch_version(tmp_path):
    here = torch.__version__.split("+")[0]
    message = import_package(tmp_path, EXTENSION, f"no ELF\0flash_attn_ext was built for torch {here}\0".encode())
    assert "compiled half cannot be loaded" in message
    assert f"built for torch {here}; torch {torch.__version__} is installed" in message


def test_the_extension_names_the_torch_of_its_headers():
    assert _ops.torch_built_for() == flash_attn_ext.build_info()["torch"]


def test_a_broken_extension_stops_with_advice(tmp_path):
    """An extension without torch's version: the message has the error of the import, and the command."""
    message = import_package(tmp_path, "_C.py", b"raise ImportError('undefined symbol: _ZN3c104impl')")
    assert message.startswith("ImportError: flash_attn_ext's compiled half cannot be loaded (undefined symbol")
    assert "pip install --force-reinstall --no-deps ." in message
