"""The op set and its backends: `reference` (plain torch), `cpu` (C++ SIMD); usable alone as a kernel library.

Knows tensors and nothing of requests, models, ranks or the wire.
"""
