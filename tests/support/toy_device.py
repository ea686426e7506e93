"""A device from outside: a folder of its own would hold this; it notes which of its methods the engine calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from allspan.kernels.ops import OpSet
from allspan.kernels.table import op_set
from allspan.worker.backend.cpu.attention import PagedMetadata
from allspan.worker.backend.cpu.backend import CpuBackend
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.program import Interpreter, Program, Rows
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.kernel import ReferenceKernel
from allspan.worker.step.backend import AttentionHeads, Executor, KernelNeeds
from allspan.worker.step.buffer_sizes import BatchSizes, ModelLimits
from allspan.worker.step.inputs import InputBuffers
from allspan.worker.step.model import DeviceModel

asked: list[str] = []


class ToyBackend(CpuBackend):
    """Plain functions, an interpreter, numpy's sampling and pages of torch."""

    capabilities = replace(CpuBackend.capabilities, gives_memory_back=False)

    def device_name(self) -> str:
        return "toy 0"

    def open_ops(self, kernels: str, threads: int, cpus: tuple[int, ...], needs: Callable[[], KernelNeeds]) -> OpSet:
        asked.append("open_ops")
        assert needs().heads
        return op_set("reference")

    def executor(
        self, program: Program, ops: OpSet, collectives: Collectives, capacity: Mapping[Rows, int], dtype: torch.dtype
    ) -> Executor:
        asked.append("executor")
        return Interpreter(program, ops, collectives, capacity, "cpu", dtype)

    def step_metadata(self, heads: AttentionHeads, cache: CacheSpec, limits: ModelLimits, ops: OpSet) -> PagedMetadata:
        asked.append("step_metadata")
        return super().step_metadata(heads, cache, limits, ops)

    def step_inputs(self, sizes: BatchSizes, model: DeviceModel) -> InputBuffers:
        asked.append("step_inputs")
        return super().step_inputs(sizes, model)

    def sampling(self, max_rows: int, width: int, ops: OpSet) -> Sampling:
        asked.append("sampling")
        return Sampling(ReferenceKernel())

    def page_store(self, spec: CacheSpec, num_pages: int) -> KVCache:
        asked.append("page_store")
        return KVCache(spec, num_pages, "cpu")

    def warm_up(self, model: DeviceModel, sizes: BatchSizes, sampling: Sampling) -> int:
        asked.append("warm_up")
        return 0
