"""The page for `pip install --find-links`, and SHA256SUMS."""

import hashlib
import html
from pathlib import Path


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _old(opened)


def _old(opened) -> str:  # Python 3.10 has no file_digest
    digest = hashlib.sha256()
    while block := opened.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def write_index(folder: Path) -> Path:
    """Writes index.html with a link to each sdist and wheel of `folder`. pip checks the sha256 of a link."""
    files = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])
    links = "\n".join(
        f'<a href="{html.escape(file.name.replace("+", "%2B"))}#sha256={sha256(file)}" '
        f'data-requires-python="&gt;=3.10">{html.escape(file.name)}</a><br>'
        for file in files
    )
    page = folder / "index.html"
    page.write_text(
        "<!DOCTYPE html>\n<html><head><meta charset='utf-8'><title>flash_attn_ext</title></head><body>\n"
        f"<h1>flash_attn_ext</h1>\n{links}\n</body></html>\n"
    )
    return page


def write_checksums(folder: Path) -> Path:
    """Writes SHA256SUMS, in the form of sha256sum, for every other file of `folder`."""
    sums = folder / "SHA256SUMS"
    files = sorted(file for file in folder.iterdir() if file.is_file() and file != sums)
    sums.write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
    return sums
