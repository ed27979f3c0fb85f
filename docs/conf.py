"""How Sphinx builds these pages: `make docs`. Every warning is an error there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "flash_attn_ext"
author = "the flash_attn_ext authors"
copyright = f"2026, {author}"
release = re.search(r'__version__ = "(.+)"', (ROOT / "flash_attn_ext" / "_version.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# Pages that are included from elsewhere link to files of the repository, which are no pages here.
suppress_warnings = ["myst.xref_missing"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"flash_attn_ext {release}"
