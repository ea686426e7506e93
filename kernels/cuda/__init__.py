"""Kernels in CUDA C++, compiled at first use by CuPy for the GPU at hand. The engine does not use them yet."""
