"""NVIDIA GPUs: tensors lie in the GPU's memory, and steps run beside the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from allspan.kernels.cuda.attention.attention import HEAD_STEPS, runs
from allspan.kernels.cuda.attention.decode import MOST_GROUP
from allspan.kernels.cuda.cache import move_pages
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.variants import variants_of
from allspan.kernels.cuda.latent.attend import attend
from allspan.kernels.errors import BackendUnavailable
from allspan.kernels.ops import OpSet
from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.available_memory import available_bytes
from allspan.worker.backend.cpu.attention import PagedMetadata
from allspan.worker.backend.cpu.step_inputs import StepBuffers
from allspan.worker.backend.cuda.attention import CudaMetadata, kept_bytes
from allspan.worker.backend.cuda.collectives import join_gpus
from allspan.worker.backend.cuda.event_wait import EventWaiter
from allspan.worker.backend.cuda.graphs import CudaSteps
from allspan.worker.backend.cuda.host_pages import HostPages as PinnedPages
from allspan.worker.backend.cuda.sampling import DeviceSampling, device_sampling
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.streams import StreamCopies, cuda_streams, current_stream
from allspan.worker.backend.cuda.warmup import warm_up
from allspan.worker.cache.budget import Room
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.cache.tiers import HostPages, PlainHostPages
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.program import Interpreter, Program, Rows
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.kernel import sampling_kernel
from allspan.worker.step.backend import AttentionHeads, Capabilities, DeviceSteps, Executor, KernelNeeds, Share
from allspan.worker.step.buffer_sizes import BatchSizes, ModelLimits
from allspan.worker.step.inputs import InputBuffers, StepMetadata
from allspan.worker.step.model import DeviceModel
from allspan.worker.step.side_copies import HostCopies, SideCopies

logger = logging.getLogger(__name__)

_HALVES = ("bfloat16", "float16")
_LEAST_CAPABILITY = {"bfloat16": ((8, 0), "float16"), "float16": ((7, 5), "float32, which is slow")}
_SUMS = {"nccl": "by NCCL", "staged": "through the host's memory"}


class CudaBackend:
    """See `allspan.worker.step.backend.Backend`."""

    capabilities = Capabilities(
        tensors="cuda", has_own_memory=True, gives_memory_back=True, has_own_rows=True, row_dtypes=_HALVES
    )

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._waiter = EventWaiter(timeout_s)
        self._device = torch.device(self.capabilities.tensors)

    def check(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device is cuda, but torch {torch.__version__} sees no GPU; use --device cpu, or install a "
                "CUDA build of torch"
            )

    def device_name(self) -> str:
        index = torch.cuda.current_device()
        return f"{torch.cuda.get_device_name(index)} (cuda:{index})"

    def memory_name(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def room(self, cpus: Sequence[int]) -> Room:
        """Returns the GPU's memory as its driver measures it, after torch has given back what it does not use."""
        torch.cuda.empty_cache()
        return Room(*torch.cuda.mem_get_info())

    def open_ops(self, kernels: str, threads: int, cpus: tuple[int, ...], needs: Callable[[], KernelNeeds]) -> OpSet:
        self.check()
        if kernels == "auto":
            needed = needs()
            kernels = kernels_for(needed)
            if kernels == "cuda":
                check_capability(needed.dtype, torch.cuda.get_device_capability())
        try:
            return op_set(kernels, threads, cpus)
        except BackendUnavailable as error:
            raise ConfigError(
                f"device is cuda with weights of 16 bits: {error}; or use --dtype float32, which is slow"
            ) from error

    def ops_beside(self, ops: OpSet, needs: Callable[[], KernelNeeds]) -> OpSet:
        return op_set("reference") if ops.name.startswith("cuda/") and kernels_for(needs()) != "cuda" else ops

    def executor(
        self, program: Program, ops: OpSet, collectives: Collectives, capacity: Mapping[Rows, int], dtype: torch.dtype
    ) -> Executor:
        tensors = self.capabilities.tensors
        return Interpreter(program, ops, collectives, capacity, tensors, dtype, torch.cuda.synchronize)

    def attention_bytes(self, heads: AttentionHeads, limits: ModelLimits) -> int:
        return kept_bytes(heads, limits)

    def step_metadata(self, heads: AttentionHeads, cache: CacheSpec, limits: ModelLimits, ops: OpSet) -> StepMetadata:
        if ops.name.startswith("cuda/"):
            return CudaMetadata(heads, cache, limits, self._device)
        return PagedMetadata(heads, self.capabilities.tensors)

    def step_inputs(self, sizes: BatchSizes, model: DeviceModel) -> InputBuffers:
        metadata = model.step_metadata[0]  # attention blocks of one shape of heads (`kernels_for`) have the same tiles
        if not isinstance(metadata, CudaMetadata):
            return StepBuffers(sizes, self._device)
        stream = current_stream() if self._device.type == "cuda" else None
        rule = metadata.cascade_rule
        made = metadata.expand_rule
        return DeviceBuffers(sizes, self._device, metadata.plan_tiles, rule, stream, self._waiter, made)

    def sampling(self, max_rows: int, width: int, ops: OpSet) -> Sampling:
        device = device_sampling(self._device, max_rows, width, self._waiter)
        return Sampling(sampling_kernel(ops.runtime), device, self._waiter.to_host)

    def page_store(self, spec: CacheSpec, num_pages: int) -> KVCache:
        return KVCache(spec, num_pages, self.capabilities.tensors)

    def side_copies(self) -> SideCopies:
        return StreamCopies(cuda_streams()) if self._device.type == "cuda" else HostCopies()

    def host_pages(self, spec: CacheSpec, num_pages: int, cpus: Sequence[int]) -> HostPages:
        if not modules.can_launch():
            return PlainHostPages(KVCache(spec, num_pages))
        needed = num_pages * spec.bytes_per_page
        if 0 < (left := available_bytes(cpus)) < needed:
            raise ConfigError(
                f"host_kv_cache_bytes: {num_pages} pages take {needed} bytes, but {left} bytes of memory are "
                "available: set it lower"
            )
        modules.driver().prepare(variants_of(move_pages, capability=modules.gpu(self._device).capability))
        host = PinnedPages(spec, num_pages, self.capabilities.tensors, cuda_streams(), waiter=self._waiter)
        host.pin()
        return host

    def collectives(
        self, host: Collectives, share: Share, timeout_s: float, on_several_hosts: Callable[[], bool]
    ) -> tuple[Collectives, str, str]:
        why_not = "the ranks are on several hosts" if on_several_hosts() else ""
        collectives, kind, why_not = join_gpus(host, share, timeout_s, why_not)
        return collectives, kind, f"GPUs sum {_SUMS[kind]}: {why_not}" if why_not else ""

    def warm_up(self, model: DeviceModel, sizes: BatchSizes, sampling: Sampling) -> int:
        launch = sampling.device.launch_once if isinstance(sampling.device, DeviceSampling) else None
        return warm_up(model, self.step_inputs(sizes, model), sizes, self._device, launch)

    def steps(
        self, model: DeviceModel, inputs: InputBuffers | None, host: Sequence[HostPages], beat: Callable[[], None]
    ) -> DeviceSteps | None:
        return CudaSteps(model, inputs if isinstance(inputs, DeviceBuffers) else None, host, self._waiter, beat)


def check_capability(dtype: str, capability: tuple[int, int]) -> None:
    """ConfigError where the kernels for this dtype do not run on such a GPU."""
    least, instead = _LEAST_CAPABILITY[dtype]
    if capability < least:
        raise ConfigError(
            f"dtype {dtype!r} takes a GPU of compute capability {least[0]}.{least[1]} or later, this one has "
            f"{capability[0]}.{capability[1]}: use --dtype {instead}"
        )


def kernels_for(needs: KernelNeeds) -> str:
    """The kernels are for 16 bits and some shapes of heads; whatever else runs on the reference ops, which is slow."""
    head_dim, group = needs.heads[0]
    if needs.latents:
        return _kernels_for_latents(needs)
    if needs.dtype in _HALVES and len(needs.heads) == 1 and runs(head_dim, group, needs.page_dtype):
        return "cuda"
    logger.warning(
        "the CUDA kernels are for bfloat16 and float16, up to %d query heads a KV head and, by the format of KV pages, "
        "head sizes in steps of %s; dtype %s, pages of %s, %d heads a KV head and a head size of %d run on torch's "
        "own, slowly",
        MOST_GROUP,
        HEAD_STEPS,
        needs.dtype,
        needs.page_dtype,
        group,
        head_dim,
    )
    return "reference"


def _kernels_for_latents(needs: KernelNeeds) -> str:
    are_alike = len(needs.heads) == len(needs.latents) == 1
    pages = attend.PAGE_DTYPES
    if needs.dtype in _HALVES and are_alike and attend.runs(*needs.latents[0]) and needs.page_dtype in pages:
        return "cuda"
    logger.warning(
        "the CUDA kernels for latent attention are for bfloat16 and float16, pages of %s, latents of up to %d elements "
        "and up to %d that turn, both in steps of %d; dtype %s, pages of %s and (latent, turning) elements of %s run "
        "on torch's own, slowly",
        pages,
        attend.MOST_LATENT,
        attend.MOST_TURNED,
        attend.STEP,
        needs.dtype,
        needs.page_dtype,
        needs.latents,
    )
    return "reference"
