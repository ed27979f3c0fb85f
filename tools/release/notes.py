"""The text of a release: its section of CHANGELOG.md, and a table of its wheels."""

import re
from collections.abc import Sequence

from .wheels import Wheel

INSTALL = """\
## Install

Choose the wheel by your torch: `pip install --find-links FOLDER_OR_URL "flash_attn_ext=={version}+torch2.13"`. The
folder has `index.html`, so its URL works as `--find-links`. `SHA256SUMS` has the checksum of each file, and
`sbom.cdx.json` the bill of materials (CycloneDX).
"""


def section(changelog: str, version: str) -> str:
    """The text below the heading of `version` in `changelog`; below "Unreleased" if the version has no heading yet.

    Raises ValueError if the changelog has neither.
    """
    parts = re.split(r"^## (.+)$", changelog, flags=re.M)
    texts = {
        heading.split()[0].strip("[]"): text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    for heading in (version, "Unreleased"):
        if texts.get(heading):
            return texts[heading]
    raise ValueError(f"CHANGELOG.md has no text below '## {version}' or '## Unreleased'; its headings: {[*texts]}")


def table(wheels: Sequence[Wheel]) -> str:
    """Returns a Markdown table with one row for each pair of torch and Python, including pairs without a wheel."""
    rows = ["| torch | Python | wheel | MB | build, minutes | result |", "|---|---|---|---|---|---|"]
    for wheel in wheels:
        size = f"{wheel.bytes / 1e6:.1f}" if wheel.file else ""
        minutes = f"{wheel.build_seconds / 60:.1f}" if wheel.file and wheel.build_seconds else ""
        rows.append(f"| {wheel.torch} | {wheel.python} | {wheel.file or ''} | {size} | {minutes} | {wheel.result} |")
    return "\n".join(rows)


def notes(changelog: str, version: str, wheels: Sequence[Wheel]) -> str:
    """Returns the whole text, in Markdown."""
    parts = [f"# flash_attn_ext {version}", section(changelog, version), INSTALL.format(version=version)]
    return "\n\n".join([*(part.strip() for part in parts), "## Wheels", table(wheels)]) + "\n"
