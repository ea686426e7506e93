"""The op set in plain torch: what every other backend is measured against, and what a missing op falls back to.

Simple and right rather than fast; works on CPU and CUDA tensors. Not batch-invariant, and it may copy to the host.
"""
