"""In a source folder where the extension was not built, each name of the package raises an error that says what to do.

Python takes a package from the current directory before an installed one, so that `python -m flash_attn_ext.iomodel`
in a clone runs the clone, also after `pip install .`. iomodel and reference need no extension and work there.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = Path(__file__).parent


def is_unbuilt() -> bool:
    """Whether this folder has no compiled half at all. _ops.py reports one that cannot be loaded.

    Only this folder counts: the finder of an editable install offers the _C of its own clone to every copy.
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
