"""The matrix products of `allspan.kernels.cuda.linear`: a module, and a CUDA source of its name, for each kernel."""
