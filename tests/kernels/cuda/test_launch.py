"""What a launch hands to the driver; a function of this process takes the driver's place."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from allspan.kernels.cuda.jit.cupy_driver import CupyDriver, Launcher
from allspan.kernels.errors import BackendUnavailable

CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@dataclass
class Cuda:
    """Keeps what cuLaunchKernelEx was told: the words of the configuration, and `sizes` bytes of each argument."""

    sizes: tuple[int, ...] = ()
    result: int = 0
    entered: bool = True
    config: list[int] = field(default_factory=list)
    attribute: bytes = b""
    arguments: list[bytes] = field(default_factory=list)

    def take(self, config: int, function: int, pointers: int, extra: int | None) -> int:
        assert (function, extra) == (4711, None)
        self.config = list(struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56)))
        self.attribute = ctypes.string_at(self.config[8], 72) if self.config[9] else b""
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        self.arguments = [ctypes.string_at(at, size) for at, size in zip(addresses, self.sizes, strict=True)]  # type: ignore[arg-type]
        return self.result if self.entered else 201

    def launcher(self, has_early: bool = True) -> Launcher:
        @dataclass
        class Function:
            ptr: int = 4711

        self._call: Any = CALL(self.take)
        return Launcher("f", self._call, self.enter, Function(), 1000, has_early)

    def enter(self) -> None:
        self.entered = True


def test_arguments_arrive_as_the_kernel_declares_them() -> None:
    x = torch.zeros(3)
    cuda = Cuda(sizes=(8, 4, 8, 4, 8, 6))
    launch = cuda.launcher()
    for tensor in (x, None, x):
        arguments = (tensor, np.int32(-7), np.int64(1 << 40), np.float32(0.5), None, b"struct")
        launch((5, 2), 64, arguments, 900, 123, False)
        address = 0 if tensor is None else x.data_ptr()
        expected = [struct.pack(*a) for a in (("Q", address), ("i", -7), ("q", 1 << 40), ("f", 0.5), ("Q", 0))]
        assert cuda.arguments == [*expected, b"struct"]
        assert cuda.config == [5, 2, 1, 64, 1, 1, 900, 123, 0, 0]


def test_a_kernel_may_begin_before_the_one_ahead_has_ended_where_the_gpu_can() -> None:
    cuda = Cuda()
    cuda.launcher()((1,), 32, (), 0, 0, True)
    assert struct.unpack_from("=I4xI", cuda.attribute) == (6, 1)
    cuda.launcher(has_early=False)((1,), 32, (), 0, 0, True)
    assert cuda.attribute == b""


def test_a_thread_that_has_not_used_cuda_yet_may_launch() -> None:
    cuda = Cuda(entered=False)
    cuda.launcher()((1,), 32, (), 0, 0, False)
    assert cuda.entered


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendUnavailable, match="CPU build"):
        CupyDriver()


def test_what_cannot_be_launched_is_refused() -> None:
    launch = Cuda(result=701).launcher()
    with pytest.raises(RuntimeError, match=r"f: CUDA refuses to launch .* error 701"):
        launch((1,), 32, (), 0, 0, False)
    with pytest.raises(BackendUnavailable, match="needs 1001 bytes of shared memory, this GPU has 1000"):
        launch((1,), 32, (), 1001, 0, False)
    with pytest.raises(TypeError, match="a int is no kernel's argument"):
        launch((1,), 32, (7,), 0, 0, False)
