"""The CPU backend: C++ kernels for several instruction sets, the best one chosen at run time."""
