"""If the extension was not built in a source folder, each name of the package raises an error with instructions.

Python prefers a package in the current directory to an installed one. So `python -m flash_attn_ext.iomodel` in a clone
runs the clone, even after `pip install .`. iomodel and reference work without the extension.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = Path(__file__).parent


def is_unbuilt() -> bool:
    """Whether this folder has no compiled extension. If it has one that cannot be loaded, _ops.py reports the error.

    Only this folder counts, because the finder of an editable install offers the _C of its clone to every copy.
    """
    return PathFinder.find_spec(f"{__package__}._C", [str(FOLDER)]) is None


def refuse(name: str) -> None:
    """The package's ``__getattr__`` if it was not built: raises for every name."""
    if name not in sys.modules[__package__].__all__:
        raise AttributeError(f"module 'flash_attn_ext' has no attribute {name!r}")
    raise ImportError(message())


def message() -> str:
    return (
        f"flash_attn_ext: the compiled half (_C) is not in {FOLDER}, a source folder that was not built. If the "
        f"package is installed, this folder hides it, as Python looks into {FOLDER.parent} first: run in another "
        "directory. To use the source folder itself, build it there: pip install -e ."
    )
