"""Measurements, for example `python -m benchmarks.compare_torch` from the repository's root."""

from pathlib import Path

ROOT = Path(__file__).parent.parent  # of the repository; child processes run there
