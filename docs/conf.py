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

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"flash_attn_ext {release}"

# Pages include Markdown files of the repository, and link to other files. On GitHub these links work as they are.
PAGES = {"csrc/README.md": "design/path.md", "tests/cuda_host/README.md": "design/host_tests.md"}
MARKER = "<!-- operator schemas -->"
LINK = re.compile(r"\]\((?:\.\./)+([\w/]+\.md)\)")


def relink(text: str, docname: str) -> str:
    """Replaces a link to a Markdown file outside docs/ by a link to its page, or else by a download."""
    up = "../" * docname.count("/")

    def replacement(link: re.Match) -> str:
        file = link[1]
        if file in PAGES:
            return f"]({up}{PAGES[file]})"
        return f"](<path:{up}../{file}>)" if (ROOT / file).exists() else link[0]

    return LINK.sub(replacement, text)


def operator_schemas() -> str:
    """The schemas of the installed build, for docs/operators.md."""
    import torch

    import flash_attn_ext  # noqa: F401  registers the operators

    operators = torch.ops.flash_attn_ext
    return "\n\n".join(
        str(getattr(operators, name).default._schema)
        for name in sorted(dir(operators))
        if "attention" in name or "dropout" in name or "append" in name
    )


def setup(app) -> None:
    def source_read(_app, docname, content):
        content[0] = relink(content[0], docname)
        if docname == "operators":
            content[0] = content[0].replace(MARKER, f"```text\n{operator_schemas()}\n```")

    def include_read(_app, _path, docname, content):
        content[0] = relink(content[0], docname)

    app.connect("source-read", source_read)
    app.connect("include-read", include_read)
