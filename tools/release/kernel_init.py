"""flash_attn_ext as a kernel of the Hugging Face Hub: attn_implementation="org/repo" in transformers.

transformers calls `flash_attn_forward` with the masks of its "sdpa". All other functions are in `library`, the package
flash_attn_ext of this folder.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent / "flash_attn_ext"


def load_library() -> ModuleType:
    """Imports the package of this folder as `flash_attn_ext`.

    A process can import only one, because its operators are registered once.
    """
    loaded = sys.modules.get("flash_attn_ext")
    if loaded is not None:
        version = (HERE / "_version.py").read_text().split('__version__ = "')[1].split('"')[0]
        if loaded.__version__ != version:
            raise ImportError(
                f"this kernel has flash_attn_ext {version}, but {loaded.__version__} is already imported from "
                f"{loaded.__file__}; use one of them"
            )
        return loaded
    spec = importlib.util.spec_from_file_location(
        "flash_attn_ext", HERE / "__init__.py", submodule_search_locations=[str(HERE)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["flash_attn_ext"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["flash_attn_ext"]
        raise
    return module


library = load_library()
flash_attn = library.flash_attn
flash_attn_varlen = library.flash_attn_varlen
flash_attn_with_kvcache = library.flash_attn_with_kvcache
activate = library.activate


def supports_flash_attn(*args, **kwargs) -> bool:
    return True


def flash_attn_forward(*args, **kwargs):
    """transformers' interface for attention: flash_attn_ext.integrations.transformers.attention."""
    from flash_attn_ext.integrations.transformers import attention

    return attention(*args, **kwargs)
