"""Layers under the names of the flash-attention package."""
