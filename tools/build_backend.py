"""The build backend: setuptools, with the installed torch.

The extension is compiled against torch, and runs with that version only. pip builds in a separate environment without
torch. If torch were a build requirement, pip would download the newest torch, not the user's version. Instead, this
backend adds the site folders of the Python that runs it; with pip this is the Python into which pip installs. If they
contain no torch, the build stops before any download, with instructions.

`pip install --no-build-isolation .` does not need this backend, but works with it.
"""

import importlib.util
import os
import site
import sys

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def require_torch() -> None:
    """Makes `import torch` possible, or ends the build with the reason and instructions."""
    if importlib.util.find_spec("torch"):
        return
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix:  # no virtual environment: packages may be in the user's folder
        folders.append(site.getusersitepackages())
    for folder in filter(os.path.isdir, folders):
        site.addsitedir(folder)  # at the end of sys.path: the packages of the build environment stay first
    if not importlib.util.find_spec("torch"):
        sys.exit(
            f"flash_attn_ext is compiled against torch, and {sys.executable} has none. Install the torch that you will "
            "use (pip install torch), then repeat this command. With uv or another tool that builds in a separate "
            "virtual environment: pass --no-build-isolation."
        )


def get_requires_for_build_wheel(config_settings=None):
    require_torch()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    require_torch()
    return build_meta.get_requires_for_build_editable(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    require_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    require_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
