"""The host's processors: tensors lie in host memory, and a step is over when its last op returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from allspan.kernels.ops import OpSet
from allspan.kernels.table import BACKENDS, op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.available_memory import available_bytes
from allspan.worker.backend.cpu.attention import PagedMetadata
from allspan.worker.backend.cpu.step_inputs import StepBuffers
from allspan.worker.cache.budget import Room
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.cache.tiers import HostPages, PlainHostPages
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.native_program import NativeProgram
from allspan.worker.program.program import Interpreter, Program, Rows
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.kernel import sampling_kernel
from allspan.worker.step.backend import AttentionHeads, Capabilities, DeviceSteps, Executor, KernelNeeds, Share
from allspan.worker.step.buffer_sizes import BatchSizes, ModelLimits
from allspan.worker.step.inputs import InputBuffers
from allspan.worker.step.model import DeviceModel
from allspan.worker.step.side_copies import HostCopies, SideCopies


class CpuBackend:
    """See `allspan.worker.step.backend.Backend`."""

    capabilities = Capabilities(tensors="cpu", gives_memory_back=sys.platform.startswith("linux"), has_own_rows=True)

    def __init__(self, timeout_s: float = 30.0) -> None:
        """Nothing is waited for: an op of the host returns when it is done."""

    def check(self) -> None:
        pass

    def device_name(self) -> str:
        return ""

    def memory_name(self) -> str:
        return ""

    def room(self, cpus: Sequence[int]) -> Room:
        return Room(available_bytes(cpus))

    def open_ops(self, kernels: str, threads: int, cpus: tuple[int, ...], needs: Callable[[], KernelNeeds]) -> OpSet:
        row = BACKENDS.get(kernels.partition("/")[0])
        if row is not None and row.device != "cpu":
            raise ConfigError(
                f"kernels is {kernels!r}, which needs device {row.device!r}; device is 'cpu': leave kernels at 'auto', "
                f"or set device to {row.device!r}"
            )
        return op_set(kernels, threads, cpus)

    def ops_beside(self, ops: OpSet, needs: Callable[[], KernelNeeds]) -> OpSet:
        return ops

    def executor(
        self, program: Program, ops: OpSet, collectives: Collectives, capacity: Mapping[Rows, int], dtype: torch.dtype
    ) -> Executor:
        if ops.program is not None:
            return NativeProgram(program, ops, collectives, capacity)
        return Interpreter(program, ops, collectives, capacity, self.capabilities.tensors, dtype)

    def attention_bytes(self, heads: AttentionHeads, limits: ModelLimits) -> int:
        return 0

    def step_metadata(self, heads: AttentionHeads, cache: CacheSpec, limits: ModelLimits, ops: OpSet) -> PagedMetadata:
        return PagedMetadata(heads, self.capabilities.tensors)

    def step_inputs(self, sizes: BatchSizes, model: DeviceModel) -> InputBuffers:
        return StepBuffers(sizes, torch.device(self.capabilities.tensors))

    def sampling(self, max_rows: int, width: int, ops: OpSet) -> Sampling:
        return Sampling(sampling_kernel(ops.runtime))

    def page_store(self, spec: CacheSpec, num_pages: int) -> KVCache:
        return KVCache(spec, num_pages)

    def side_copies(self) -> SideCopies:
        return HostCopies()

    def host_pages(self, spec: CacheSpec, num_pages: int, cpus: Sequence[int]) -> HostPages:
        return PlainHostPages(KVCache(spec, num_pages))

    def collectives(
        self, host: Collectives, share: Share, timeout_s: float, on_several_hosts: Callable[[], bool]
    ) -> tuple[Collectives, str, str]:
        return host, "", ""

    def warm_up(self, model: DeviceModel, sizes: BatchSizes, sampling: Sampling) -> int:
        return 0

    def steps(
        self, model: DeviceModel, inputs: InputBuffers | None, host: Sequence[HostPages], beat: Callable[[], None]
    ) -> DeviceSteps | None:
        return None
