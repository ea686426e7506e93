"""A device of tests: the CUDA kernels, emulated, on tensors of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
from torch import Tensor

from allspan.kernels.ops import OpSet
from allspan.kernels.table import op_set
from allspan.protos.config.settings import CHOICES, STEP_SIZES
from allspan.worker.backend.cpu.backend import CpuBackend
from allspan.worker.backend.cuda.backend import CudaBackend
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.step_layout import chunk_buckets
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


class Again:
    """A recording that computes the step anew, from where its inputs lie."""

    def __init__(self, forward: Callable[[], Tensor], note: Callable[[], None]) -> None:
        self._forward, self._note = forward, note
        forward()

    def replay(self) -> Tensor:
        self._note()
        return self._forward()


class RecordedSteps:
    """See `allspan.worker.step.backend.DeviceSteps`."""

    def __init__(self, model: DeviceModel, buffers: DeviceBuffers, replays: set[tuple[int, int]]) -> None:
        """`replays` gets the tokens that replayed steps are padded to, and those that keys and values are made of."""
        self._model, self._buffers, self._replays = model, buffers, replays

    def drain(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def capture(self) -> None:
        self._buffers.chunks = chunk_buckets(self._buffers.max_tokens)
        for inputs in self._buffers.paddings():
            made = 0 if inputs.expanded is None else inputs.expanded.rows
            note = partial(self._replays.add, (inputs.bucket, made))
            self._model.capture(inputs, lambda forward, others, note=note: Again(forward, note))


class RecordingBackend(EmulatedBackend):
    """Steps with prompts of up to 16 tokens are recorded, larger ones that are nearly full, and decodes."""

    made: ClassVar[list[set[tuple[int, int]]]] = []
    """For each model of each rank, the tokens that replayed steps were padded to, and those that keys and values were
    made of."""

    def steps(
        self, model: DeviceModel, inputs: InputBuffers | None, host: Sequence[HostPages], beat: Callable[[], None]
    ) -> DeviceSteps | None:
        if not isinstance(inputs, DeviceBuffers):
            return None
        self.made.append(set())
        return RecordedSteps(model, inputs, self.made[-1])


def add_device(monkeypatch: pytest.MonkeyPatch, name: str = NAME, backend: type = EmulatedBackend) -> dict[str, str]:
    """Adds a device to the tables for the time of a test; the settings of an engine that runs on it."""
    monkeypatch.setitem(DEVICES, name, f"{backend.__module__}:{backend.__name__}")
    monkeypatch.setitem(STEP_SIZES, name, STEP_SIZES["cpu"])
    monkeypatch.setitem(CHOICES, "device", (*CHOICES["device"], name))
    return {"device": name}
