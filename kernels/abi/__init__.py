"""Structs that Python, C++ and CUDA share: declared here, the headers made from them."""
