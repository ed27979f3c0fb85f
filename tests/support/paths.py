"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CPP = ROOT / "tests" / "cpp"
