"""Builds flash_attn_ext._C: the operators, their CPU kernels and, if possible, the CUDA kernels.

FLASH_ATTN_EXT_CUDA=1   builds the CUDA kernels; an error if this is not possible
FLASH_ATTN_EXT_CUDA=0   builds without CUDA kernels
unset                   a CUDA build of torch requires the CUDA kernels; a CPU build of torch omits them

FLASH_ATTN_EXT_LOCAL_VERSION=1   appends torch's version to the package's version, as 0.1.0+torch2.13, so that wheels
for different versions of torch have different names
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    if not {"sdist", "egg_info"} & set(sys.argv):  # an sdist holds sources only
        sys.exit(
            f"flash_attn_ext needs torch where it is built ({error}). "
            "Install torch first, then: pip install --no-build-isolation ."
        )
    torch = None

# cpp_extension compiles in parallel if it finds ninja. pip installs ninja next to the interpreter, which may not be on
# PATH.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

OLDEST_TORCH = "2.11"
CSRC = "csrc"
# Objects are in the tree, also with pip, which would use a new folder each time. So a build after an edit compiles only
# changed files, and tests/cpu/test_object_files.py can read the objects.
OBJECTS = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
# Sources that include torch are one translation unit: torch's headers take 7 CPU seconds in each unit. One unit
# takes 0.7 of the CPU seconds of three. docs/packaging.md has the time of all sources. The sources check and pack
# arguments, so they do not need -O3.
UNITS = ["torch"]
# Kernels for CPUs without AVX2 and NEON have few passes of the compiler, which halves the CPU seconds of their
# compilation. On x86-64 float32 results keep their bits. Calls take 1.13 times as long; a decoding step of one row
# takes 1.4 times.
SLOW_KERNELS = ["isa_generic"]
# Sources that compile for a long time are first, so that no processor is idle at the end.
CPU = ["isa_generic", "isa_avx512", "isa_avx2", "isa_avx512_bf16", "isa_amx", "isa_neon", "isa_neon_bf16"]
CPU += ["int8_avx512_vnni", "int8_avx512", "int8_avx2", "int8_generic"]
CPU += ["amx_permission", "int8", "key_lists", "select", "task_list", "why_not", "widen_float8"]
CUDA = ["simt/workspace.cpp", "simt/why_not.cpp", "simt/functions.cpp", "sm75/why_not.cpp"]
CUDA += ["sm80/why_not.cpp", "sm80/decode_splits.cpp"]
CUDA += ["sm90/why_not.cpp", "sm90/few_rows.cpp", "sm90/sorted_rounds.cpp", "sm90/task_rounds.cpp", "gpu_code.cpp"]
CUDA += [
    f"sm80/{way}_{dtype}.cu" for way in ("forward", "backward", "flex_forward") for dtype in ("bfloat16", "float16")
]
CUDA += [f"sm90/{way}_{dtype}.cu" for way in ("forward", "backward") for dtype in ("bfloat16", "float16")]
# The other CUDA sources are compiled several at a time: headers take two CPU seconds in each unit. A unit takes less
# time than sm80/forward_bfloat16.cu alone, so a build on many processors takes no longer. A unit's name begins with its
# tier.
CUDA_UNITS = ["cuda_small", "sm75_all", "sm80_decode", "sm80_flex_backward", "sm80_jvp"]
CUDA_UNITS += ["sm90_flex_backward", "sm90_flex_forward", "sm90_score_forward", "sm90_small"]
CUDA_UNITS += [f"simt_{way}" for way in ("backward", "double_backward", "indexed", "indexer", "jvp", "weights")]
CUDA_UNITS += [f"simt_{way}_{bits}" for way in ("forward", "flex") for bits in ("16", "32_64")]


def cuda_toolkit() -> Path | None:
    """Returns the CUDA toolkit: CUDA_HOME if set, otherwise torch's guess, otherwise the default folder."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    # torch guesses from the nvcc on PATH, which may be a wrapper outside its toolkit, so check for headers.
    for place in [named] if named else [cpp_extension.CUDA_HOME, "/usr/local/cuda"]:
        if place and (Path(place) / "bin/nvcc").exists() and (Path(place) / "include/cuda_runtime.h").exists():
            return Path(place)
    return None


def cuda_wanted() -> bool:
    """Returns whether to build the CUDA kernels. Exits if they are required but cannot be built."""
    asked = os.environ.get("FLASH_ATTN_EXT_CUDA", "")
    if asked not in ("", "0", "1"):
        sys.exit(f"FLASH_ATTN_EXT_CUDA: got {asked!r}; allowed: 0, 1 or unset")
    if asked == "0" or (asked == "" and torch.version.cuda is None):
        return False
    why = "FLASH_ATTN_EXT_CUDA=1" if asked == "1" else f"torch {torch.__version__} is a CUDA build"
    if torch.version.cuda is None:
        sys.exit(f"flash_attn_ext: {why}, but torch {torch.__version__} is a CPU build; install a CUDA build of torch")
    toolkit = cuda_toolkit()
    if toolkit is None:
        sys.exit(
            f"flash_attn_ext: {why}, but no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) was found in "
            f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}; set CUDA_HOME, or FLASH_ATTN_EXT_CUDA=0 for an "
            "extension that runs on CPU only"
        )
    cpp_extension.CUDA_HOME = str(toolkit)
    return True


def extension(with_cuda: bool):
    sources = [f"{CSRC}/built_for.cpp"]
    sources += [f"{CSRC}/translation_units/{name}.cpp" for name in UNITS]
    sources += [f"{CSRC}/cpu/{name}.cpp" for name in CPU]
    sources += [f"{CSRC}/cuda/tiers.cpp"]  # in every build, because forcing a tier that was not built must be an error
    # -fopenmp: at::parallel_for is an inline template, which is serial without this flag.
    # -Wno-psabi: no vector wider than the baseline's is passed from one object file to another.
    # -g0: Python's flags request debug information, which doubles the build time.
    flags = ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"]
    link_flags = ["-fopenmp"]
    if sys.platform == "darwin":  # Apple's clang has no OpenMP: one thread
        flags.remove("-fopenmp")
        link_flags = []
    kind = cpp_extension.CppExtension
    if with_cuda:
        sources += [f"{CSRC}/cuda/{name}" for name in CUDA]
        sources += [f"{CSRC}/translation_units/{name}.cu" for name in CUDA_UNITS]
        flags += ["-DFLASH_ATTN_EXT_WITH_CUDA"]
        flags = {"cxx": flags, "nvcc": ["-O3", "--expt-relaxed-constexpr", "-DFLASH_ATTN_EXT_WITH_CUDA"]}
        # This list has no machine code for newer GPUs. Their driver compiles the PTX of 8.0 at the first use.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX;9.0a")
        flags["cxx"] += [f"-DFLASH_ATTN_EXT_GPU_CODE={gpu_code()}"]
        kind = cpp_extension.CUDAExtension
        add_wheel_headers()
    included = sorted(
        str(path) for pattern in ("**/*.h", "**/*.cuh", "**/*.cpp", "**/*.cu") for path in Path(CSRC).glob(pattern)
    )
    return kind("flash_attn_ext._C", sources, depends=included, extra_compile_args=flags, extra_link_args=link_flags)


def gpu_code() -> str:
    """Returns the GPUs for which nvcc generates code, as "compute_80,sm_80,sm_90a". cuda/gpu_code.h needs the list."""
    # A private function that BuildExtension also calls, so the lists are equal. Parsing TORCH_CUDA_ARCH_LIST might
    # differ.
    options = cpp_extension._get_cuda_arch_flags()
    return ",".join(re.search(r"code=(\w+)$", option)[1] for option in options)


def options_of_tier(tier: str) -> list[str]:
    """Returns nvcc's -gencode options for a tier's sources: the GPUs of the list on which the tier runs.

    nvcc would also compile the tier for the other GPUs of the list, where its kernels only trap. If the tier runs on no
    GPU of the list, the result has one GPU, because nvcc compiles the host's half, too.
    """
    options = cpp_extension._get_cuda_arch_flags()
    runs_on = {"sm75": r"compute_7[5-9]\b", "sm90": r"compute_90a\b"}[tier]
    return [option for option in options if re.search(f"arch={runs_on}", option)] or options[-1:]


def options_with_shared_ptx() -> list[str]:
    """Returns nvcc's -gencode options for sources with the same text for every GPU from compute capability 8.0 on.

    Machine code of all these GPUs comes from the PTX of the oldest GPU. So nvcc's slowest step runs once, not once for
    each GPU. PTX of 8.0 and 9.0a differ in one conversion: `mov` or `cvt` of bfloat16 to float.
    """
    options = cpp_extension._get_cuda_arch_flags()
    bases = [int(number) for option in options for number in re.findall(r"arch=compute_(\d+),", option)]
    oldest = min((number for number in bases if number >= 80), default=None)

    def share(option: str) -> str:
        gpu = re.search(r"code=sm_(\d+)", option)
        if oldest is None or gpu is None or int(gpu[1]) < oldest:
            return option
        return re.sub(r"arch=compute_\w+", f"arch=compute_{oldest}", option)

    return [share(option) for option in options]


def compression() -> list[str]:
    """Returns nvcc's options to compress GPU code with zstd.

    The code has a quarter of the bytes of nvcc's default compression. Drivers before 12.4 cannot read it. CUDA 13 needs
    a later driver, but CUDA 12 also runs on earlier ones.
    """
    return ["--compress-mode=size"] if int(torch.version.cuda.split(".")[0]) >= 13 else []


def add_wheel_headers() -> None:
    """Adds the CUDA headers of torch's wheels (such as cusparse.h) after the toolkit's headers."""
    site = Path(torch.__file__).parent.parent
    found = sorted(str(path) for path in (site / "nvidia").glob("cu1[0-9]/include"))
    os.environ["CPATH"] = os.pathsep.join(filter(None, [os.environ.get("CPATH", ""), *found]))


def is_gcc() -> bool:
    version = subprocess.run([cpp_extension.get_cxx_compiler(), "--version"], capture_output=True, text=True).stdout
    return "Free Software Foundation" in version


def flags_of_units() -> list[str]:
    """The flags for UNITS, after the flags of all sources. A call takes the same time as at -O2."""
    if not is_gcc():
        return ["-O1"]
    # The two passes take a sixteenth of the time. Garbage collection from 1 GB on, not from 100 MB, saves a tenth.
    passes = ["-fno-tree-pta", "-fno-tree-dominator-opts"]
    return ["-O1", "-finline-small-functions", *passes, "--param=ggc-min-heapsize=1000000"]


def flags_of_slow_kernels() -> list[str]:
    """The flags for SLOW_KERNELS. Without these passes of -O1 they compile in 0.8 of the time and take 1.00 to 1.02."""
    passes = "tree-dse thread-jumps tree-sink ssa-phiopt tree-coalesce-vars tree-bit-ccp ipa-pure-const"
    passes += " ipa-reference ipa-modref shrink-wrap compare-elim cprop-registers"
    passes += " combine-stack-adjustments guess-branch-probability"
    return [*flags_of_units(), *(f"-fno-{name}" for name in passes.split() if is_gcc())]


def flags_of_kernels() -> list[str]:
    """The flags for kernels, after the flags of all sources."""
    if not is_gcc():
        return []
    # The passes of -O3 that kernels need. Measured on a Zen 4: forward, backward, decode and forward mode, four dtypes.
    # Time with these flags / time with -O3: 0.95 to 1.02. Time with plain -O2 / time with -O3: up to 1.37.
    flags = "-O2 -ftree-vectorize -fvect-cost-model=dynamic -funswitch-loops -fpeel-loops -fsplit-loops -fsplit-paths"
    flags += " -fgcse-after-reload -ftree-partial-pre"
    if sysconfig.get_platform().endswith("x86_64"):
        # Without these passes kernels take 0.92 to 1.04 of the time, in the mean 1 (AVX2 and AVX-512, Emerald Rapids).
        flags += " -fno-ipa-cp -fno-schedule-insns2 -fno-tree-dominator-opts"
    flags += " --param=ggc-min-heapsize=400000"  # garbage collection from 400 MB on
    inlining = {"max-inline-insns-single": 200, "max-inline-insns-auto": 30, "inline-min-speedup": 15}
    return flags.split() + [f"--param={name}={value}" for name, value in inlining.items()]


def with_flags(flags, more: list[str], for_nvcc: list[str]):
    """Returns the `flags` of an extension with more flags for the C++ compiler and for nvcc."""
    if not isinstance(flags, dict):  # an extension without CUDA
        return [*flags, *more]
    return dict(flags, cxx=[*flags["cxx"], *more], nvcc=[*flags["nvcc"], *for_nvcc])


def tier_of(source: str) -> str:
    """Returns the folder of a source, or the first word of a unit's name."""
    path = Path(source)
    return path.stem.partition("_")[0] if path.parent.name == "translation_units" else path.parent.name


def groups_of(sources: list[str]) -> list[tuple[list[str], list[str], list[str]]]:
    """Returns the sources in groups that have the same flags: (sources, flags for C++, flags for nvcc).

    The groups are in the order in which ninja begins them: UNITS compile longest, so they are first.
    """
    units, slow_kernels = ([s for s in sources if Path(s).stem in stems] for stems in (UNITS, SLOW_KERNELS))
    tiers = {
        tier: [source for source in sources if tier_of(source) == tier and Path(source).suffix == ".cu"]
        for tier in ("sm90", "sm75")
    }
    of_one_tier = [source for group in tiers.values() for source in group]
    kernels = [source for source in sources if source not in units + slow_kernels + of_one_tier]
    has_cuda = any(Path(source).suffix == ".cu" for source in sources)
    groups = [(units, flags_of_units(), []), (slow_kernels, flags_of_slow_kernels(), [])]
    groups += [(kernels, flags_of_kernels(), options_with_shared_ptx() + compression() if has_cuda else [])]
    groups += [
        (group, flags_of_kernels(), options_of_tier(tier) + compression()) for tier, group in tiers.items() if group
    ]
    return groups


@contextlib.contextmanager
def one_run_of_ninja():
    """Compiles the files of all calls of torch's compile() in the block side by side.

    Each call writes build.ninja and runs ninja, but ninja has one set of flags for all files. So this function renames
    each build.ninja, and runs ninja once on all of them. Without ninja, each call compiles one file after the other.
    """
    run_ninja, postponed = getattr(cpp_extension, "_run_ninja_build", None), []
    if run_ninja is None:  # it is private, so a later torch may lack it: each call runs ninja
        yield
        return

    def postpone(folder: str, *args, **options) -> None:
        Path(folder, "build.ninja").rename(Path(folder, f"group_{len(postponed)}.ninja"))
        postponed.append((folder, args, options))

    cpp_extension._run_ninja_build = postpone
    try:
        yield
    finally:
        cpp_extension._run_ninja_build = run_ninja
    if postponed:
        folder, args, options = postponed[-1]
        groups = (f"subninja group_{number}.ninja\n" for number in range(len(postponed)))
        Path(folder, "build.ninja").write_text("".join(groups))
        run_ninja(folder, *args, **options)


def build_in_tree() -> type:
    """torch's BuildExtension with objects in OBJECTS and flags for each group of sources."""

    class BuildInTree(cpp_extension.BuildExtension):
        def finalize_options(self) -> None:
            self.build_temp = self.build_temp or OBJECTS
            super().finalize_options()

        def build_extension(self, ext) -> None:
            compile_all = self.compiler.compile

            def compile_in_groups(sources, *args, extra_postargs=None, **options):
                sources = sorted(sources, key=ext.sources.index)  # setuptools sorts them by name
                with one_run_of_ninja():
                    objects = [
                        compile_all(group, *args, extra_postargs=with_flags(extra_postargs, *flags), **options)
                        for group, *flags in groups_of(sources)
                    ]
                return list(itertools.chain.from_iterable(objects))

            self.compiler.compile = compile_in_groups
            try:
                super().build_extension(ext)
            finally:
                self.compiler.compile = compile_all

    return BuildInTree


def torch_minor() -> str:
    """Returns the minor version, such as "2.13".

    A C++ extension works only with the minor version that it was compiled for.
    """
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < tuple(map(int, OLDEST_TORCH.split("."))):
        sys.exit(f"flash_attn_ext needs torch {OLDEST_TORCH} or later; installed is {torch.__version__}")
    return f"{major}.{minor}"


def version() -> str:
    here = Path(__file__).parent
    number = re.search(r'__version__ = "(.+)"', (here / "flash_attn_ext/_version.py").read_text())[1]
    labelled = torch and os.environ.get("FLASH_ATTN_EXT_LOCAL_VERSION") == "1"
    return f"{number}+torch{torch_minor()}" if labelled else number


setup(
    version=version(),
    license="BSD-3-Clause",
    install_requires=[f"torch=={torch_minor()}.*" if torch else f"torch>={OLDEST_TORCH}"],
    ext_modules=[extension(cuda_wanted())] if torch else [],
    cmdclass={"build_ext": build_in_tree()} if torch else {},
)
