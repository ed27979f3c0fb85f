"""Measurements on a GPU. `make gpu` runs them (tools/gpu)."""
