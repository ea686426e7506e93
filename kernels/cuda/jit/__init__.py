"""Compiles, caches and launches the CUDA sources of this package."""
