"""Builds and tests the conda recipe where conda-forge's packages are out of reach.

    python tools/release/conda/local_channel.py --out build/conda

It makes a channel of this machine's Python and compiler and of PyPI's wheels, under the names that the recipe requires.
rattler-build (PyPI: py-rattler-build) then builds the recipe from this channel alone, installs the package in an empty
environment, and runs the recipe's tests. So a requirement that is missing in the recipe is missing in the build, too.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import rattler_build

HERE = Path(__file__).parent
PLATFORM = "linux-64"
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
# conda's name -> PyPI's. torch's wheel holds libtorch.
WHEELS = {
    "pip": "pip",
    "setuptools": "setuptools>=77",
    "ninja": "ninja",
    "pybind11": "pybind11",
    "pytorch": "torch=={torch}",
}
EMPTY = {"libtorch": "pytorch"}  # name -> the package that has its files
# The recipe asks for a compiler and a C library by these names. The files are the system's.
VARIANTS = "cxx_compiler: [system_gxx]\nc_stdlib: [system_libc]\nc_stdlib_version: ['2']\n"
COMPILER = "export CXX=/usr/bin/g++ CC=/usr/bin/gcc\n"


class Channel:
    """A folder of packages with its index."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.records = folder, {}
        for platform in (PLATFORM, "noarch"):
            (folder / platform).mkdir(parents=True, exist_ok=True)

    def add(self, name: str, version: str, files: Path, depends: tuple[str, ...] = ()) -> None:
        print(f"{name} {version}", flush=True)
        made = rattler_build.assemble_package(
            name, version, PLATFORM, "local_0", self.folder / PLATFORM,
            files=rattler_build.collect_files(files, include_hidden=True), depends=list(depends),
            compression_level=1,
        )  # fmt: skip
        path = Path(made.path)
        self.records[path.name] = {
            "name": name, "version": version, "build": "local_0", "build_number": 0, "depends": list(depends),
            "subdir": PLATFORM, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size,
        }  # fmt: skip

    def write_index(self) -> None:
        for platform, records in ((PLATFORM, self.records), ("noarch", {})):
            text = json.dumps({"info": {"subdir": platform}, "packages": {}, "packages.conda": records})
            (self.folder / platform / "repodata.json").write_text(text)


def copy_python(to: Path) -> None:
    """Copies this Python without its tests and its installed packages."""
    prefix = Path(sys.base_prefix)
    tag = Path(SITE).parent.name
    (to / "bin").mkdir(parents=True)
    shutil.copy2(prefix / "bin" / tag, to / "bin" / tag)
    for name in ("python", "python3"):
        (to / "bin" / name).symlink_to(tag)
    ignored = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "idlelib", "config-*")
    shutil.copytree(prefix / "lib" / tag, to / "lib" / tag, ignore=ignored)
    (to / SITE).mkdir()
    shutil.copytree(sysconfig.get_path("include"), to / "include" / tag)
    for library in (prefix / "lib").glob(f"lib{tag}*.so*"):
        shutil.copy2(library, to / "lib" / library.name)


def install(requirement: str, to: Path) -> str:
    """Installs a requirement of PyPI and its dependencies, and returns the version."""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", to / SITE, requirement], check=True)
    if (to / SITE / "bin").exists():
        shutil.move(to / SITE / "bin", to / "bin")
    name = requirement.partition(">")[0].partition("=")[0]
    found = next((to / SITE).glob(f"{name}-*.dist-info")).name.removesuffix(".dist-info")
    return found.split("-")[1].partition("+")[0]


def make_channel(folder: Path, torch: str) -> Channel:
    channel, files = Channel(folder / "channel"), folder / "files"
    python = sys.version.split()[0]
    needs_python = (f"python {python}.*",)
    copy_python(files / "python")
    channel.add("python", python, files / "python")
    for name, requirement in WHEELS.items():
        version = install(requirement.format(torch=torch), files / name)
        channel.add(name, version, files / name, () if name == "ninja" else needs_python)  # ninja is a program
    for name, of in EMPTY.items():
        (files / name).mkdir()
        channel.add(name, "1", files / name, (of,))
    activate = files / "gxx/etc/conda/activate.d/system_gxx.sh"
    activate.parent.mkdir(parents=True)
    activate.write_text(COMPILER)
    channel.add(f"system_gxx_{PLATFORM}", "1", files / "gxx")
    (files / "libc").mkdir()
    channel.add(f"system_libc_{PLATFORM}", "2", files / "libc")
    channel.write_index()
    return channel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/conda"))
    parser.add_argument("--torch", default="2.13.0")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    out = options.out.resolve()
    channel = make_channel(out, options.torch)
    variants = out / "variants.yaml"
    variants.write_text(VARIANTS)
    recipe = rattler_build.Stage0Recipe.from_file(HERE / "recipe.yaml")
    built = recipe.run_build(
        rattler_build.VariantConfig.from_file(variants), output_dir=out / "packages", channels=[channel.folder.as_uri()]
    )
    made = Path(next(path for result in built for path in result.packages))
    print(made)
    channels = [(out / "packages").as_uri(), channel.folder.as_uri()]
    results = rattler_build.Package.from_file(made).run_tests(channel=channels)
    for result in results:
        print(result, *result.output[-8:], sep="\n")
    return 0 if all(result.success for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
