"""Times the CUDA kernels beside other libraries, on one GPU; `allspan bench kernels` runs it."""
