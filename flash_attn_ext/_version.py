"""The version of this package. setup.py reads it without importing anything."""

__version__ = "0.1.0"
