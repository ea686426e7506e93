"""The fixtures of tests that run CUDA kernels, emulated or on a GPU."""

from support.cuda_fixtures import device, emulator, on, one_thread, small

__all__ = ["device", "emulator", "on", "one_thread", "small"]
