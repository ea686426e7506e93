"""A device of tests: the CUDA kernels, emulated, on tensors of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from allspan.kernels.ops import OpSet
from allspan.kernels.table import op_set
from allspan.protos.config.settings import CHOICES, STEP_SIZES
from allspan.worker.backend.cpu.backend import CpuBackend
from allspan.worker.backend.cuda.backend import CudaBackend
from allspan.worker.backend.table import DEVICES
from allspan.worker.cache.budget import Room
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.cache.tiers import HostPages, PlainHostPages
from allspan.worker.step.backend import DeviceSteps, KernelNeeds
from allspan.worker.step.inputs import InputBuffers
from allspan.worker.step.model import DeviceModel

NAME = "emulated"


class EmulatedBackend(CudaBackend):
    """Steps come as a GPU's and are over when they return; the host samples."""

    capabilities = replace(CudaBackend.capabilities, tensors="cpu", has_own_memory=False)

    def check(self) -> None:
        pass

    def device_name(self) -> str:
        return NAME

    def memory_name(self) -> str:
        return ""

    def room(self, cpus: Sequence[int]) -> Room:
        return CpuBackend().room(cpus)

    def open_ops(self, kernels: str, threads: int, cpus: tuple[int, ...], needs: Callable[[], KernelNeeds]) -> OpSet:
        return op_set("cuda", threads, cpus)

    def host_pages(self, spec: CacheSpec, num_pages: int, cpus: Sequence[int]) -> HostPages:
        return PlainHostPages(KVCache(spec, num_pages))

    def steps(
        self, model: DeviceModel, inputs: InputBuffers | None, host: Sequence[HostPages], beat: Callable[[], None]
    ) -> DeviceSteps | None:
        return None


def add_device(monkeypatch: pytest.MonkeyPatch, name: str = NAME, backend: type = EmulatedBackend) -> dict[str, str]:
    """Adds a device to the tables for the time of a test; the settings of an engine that runs on it."""
    monkeypatch.setitem(DEVICES, name, f"{backend.__module__}:{backend.__name__}")
    monkeypatch.setitem(STEP_SIZES, name, STEP_SIZES["cpu"])
    monkeypatch.setitem(CHOICES, "device", (*CHOICES["device"], name))
    return {"device": name}
