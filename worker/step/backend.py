"""The one door to a device: what the engine asks of it. A device is a folder of `allspan.worker.backend` and a row of
`allspan.worker.backend.table.DEVICES`; nothing else asks which device it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from allspan.kernels.latent_tensors import LatentSizes
from allspan.kernels.ops import OpSet
from allspan.protos.api.engine import OpProfile
from allspan.worker.cache.budget import Room
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.cache.tiers import HostPages
from allspan.worker.parallel.base import Collectives
from allspan.worker.program.program import Program, Rows, Slot
from allspan.worker.sampling.device import Sampling
from allspan.worker.step.buffer_sizes import BatchSizes, ModelLimits
from allspan.worker.step.inputs import InputBuffers, StepMetadata
from allspan.worker.step.model import DeviceModel, RankAdapters
from allspan.worker.step.rank_drafter import RankDrafter
from allspan.worker.step.side_copies import SideCopies

HOST = "cpu"
"""The torch device of host memory."""

Share = Callable[[bytes], list[bytes]]
"""Gives every rank each rank's bytes (at most 1 KiB, no zero byte at their end); all ranks call it at once."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What is fixed about a device before a model is loaded on it."""

    tensors: str
    """Where its tensors lie, as torch says it."""
    has_own_memory: bool = False
    """Weights, pages and buffers take the device's memory, not the host's."""
    gives_memory_back: bool = False
    """Memory that tensors hold can be given back and taken again while they live."""
    has_own_rows: bool = False
    """Steps may have rows for whose attention only other ranks have the pages."""
    row_dtypes: tuple[str, ...] = ()
    """Dtypes of weights for which packed matrices lie in rows (`allspan.kernels.packed_spec`); of others in panels."""


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What a model asks of the kernels, by which a device chooses them."""

    dtype: str
    """The dtype of the weights that are not quantised."""
    page_dtype: str
    heads: tuple[tuple[int, int], ...]
    """For each kind of attention block, the head size and the most query heads that read one KV head."""
    latents: tuple[tuple[int, int], ...] = ()
    """For each kind of attention block whose keys and values are made of latents, the elements of a latent, and those
    that turn beside it."""


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """This rank's heads of an attention block."""

    head_dim: int
    num_kv_heads: int
    kv_head_of: tuple[int, ...]
    """For each query head of this rank, the KV head that it reads."""
    most_kv_heads: int
    """The most KV heads of any rank."""
    group: int
    """Query heads that read one KV head, at most on any rank."""
    scale: float
    """The factor of the products of queries and keys."""
    window: int = 0
    """Tokens that a query sees, its own included; 0: all."""
    soft_cap: float = 0.0
    """The limit of the logits, which tanh approaches; 0: none."""
    slopes: tuple[float, ...] | None = None
    """For each query head of this rank, what is added to a logit for each token that the key is ahead of the query."""
    latents: LatentSizes | None = None
    """Where the cache holds latents: what keys and values are made of, head by head."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The buffers and the sampling kernels that a backend made for the steps of one engine, its adapters, and its
    drafter."""

    inputs: InputBuffers
    sampling: Sampling
    adapters: RankAdapters | None = None
    """None: requests take none."""
    drafter: RankDrafter | None = None
    """None: no model drafts in the ranks."""


class Executor(Protocol):
    """Runs one program. Its buffers are made for as many rows as the model's limits say."""

    @property
    def progress(self) -> int:
        """Counts up within a run: a long step is told from one that hangs."""

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that ops write to, where they may be given back between two steps."""

    def bind(self, values: Mapping[str, Any]) -> None:
        """Sets named slots; a name that the program does not use is passed over."""

    def run(self, inputs: Mapping[str, Any], num_tokens: int, num_logits: int, num_own: int = 0) -> Tensor:
        """The output's rows of this step, a view that the next run overwrites. `num_own`: of its tokens those whose
        attention this rank computes, where the program tells them from others."""

    def rows(self, slot: Slot) -> Tensor:
        """A buffer at its full capacity, as the last run left it."""

    def start_profile(self) -> None:
        """Times every op of the coming runs, from zero."""

    def stop_profile(self) -> None:
        """Stops timing; what was measured stays readable."""

    def profile(self) -> tuple[OpProfile, ...]:
        """The time of each op since `start_profile`, the longest in total first; empty before any."""


class DeviceSteps(Protocol):
    """The recorded steps of a device, and what is still on its way there."""

    def drain(self) -> None:
        """Waits until no step and no copy is on its way. Raises DeadlineExceeded."""

    def capture(self) -> None:
        """Records the steps, where they are to be recorded."""

    def trim(self) -> None:
        """Returns memory that was freed to the driver, so that other programs can have it."""


class Backend(Protocol):
    """One kind of device."""

    capabilities: Capabilities

    def check(self) -> None:
        """Raises ConfigError where this process has no such device."""

    def device_name(self) -> str:
        """The name of this process's device; "" for the host's processors."""

    def memory_name(self) -> str:
        """Identifies the device's memory: ranks with the same name share it; "" for host memory."""

    def room(self, cpus: Sequence[int]) -> Room:
        """Memory that this process may still take; `cpus`: those that it runs on."""

    def open_ops(self, kernels: str, threads: int, cpus: tuple[int, ...], needs: Callable[[], KernelNeeds]) -> OpSet:
        """The op set `kernels` of `allspan.kernels.table`, or for "auto" the best for a model with such `needs`.
        Raises ConfigError for a device that is not there or too old, and what `op_set` raises."""

    def ops_beside(self, ops: OpSet, needs: Callable[[], KernelNeeds]) -> OpSet:
        """The op set of a further model in the ranks, with such `needs`, beside one that runs on `ops`."""

    def executor(
        self, program: Program, ops: OpSet, collectives: Collectives, capacity: Mapping[Rows, int], dtype: torch.dtype
    ) -> Executor:
        """Runs `program` in steps of at most so many rows; `dtype` of the activations between ops."""

    def attention_bytes(self, heads: AttentionHeads, limits: ModelLimits) -> int:
        """What attention with these heads keeps on the device for itself, beside pages and as far as it grows with
        steps and contexts; at most, and known without the device."""

    def step_metadata(self, heads: AttentionHeads, cache: CacheSpec, limits: ModelLimits, ops: OpSet) -> StepMetadata:
        """For the attention blocks that have these heads and pages."""

    def step_inputs(self, sizes: BatchSizes, model: DeviceModel) -> InputBuffers:
        """The buffers of a step's inputs, as the model's kernels want them."""

    def sampling(self, max_rows: int, width: int, ops: OpSet) -> Sampling:
        """The kernels that sample `max_rows` requests from logits of `width` columns."""

    def page_store(self, spec: CacheSpec, num_pages: int) -> KVCache:
        """The pages of one cache group. Raises ConfigError when the memory cannot be had."""

    def side_copies(self) -> SideCopies:
        """Copies to the device's memory beside steps."""

    def host_pages(self, spec: CacheSpec, num_pages: int, cpus: Sequence[int]) -> HostPages:
        """The second tier of one cache group's pages, in host memory. Raises ConfigError when the memory cannot be
        had."""

    def collectives(
        self, host: Collectives, share: Share, timeout_s: float, on_several_hosts: Callable[[], bool]
    ) -> tuple[Collectives, str, str]:
        """Collectives for the device's tensors over those of host memory, their kind ("": those of the host), and a
        sentence for the operator ("": nothing to say). Every rank calls it at once."""

    def warm_up(self, model: DeviceModel, sizes: BatchSizes, sampling: Sampling) -> int:
        """Compiles every kernel that steps of these sizes launch; returns the bytes that a step takes beside the
        buffers that are there. Every rank calls it at once."""

    def steps(
        self, model: DeviceModel, inputs: InputBuffers | None, host: Sequence[HostPages], beat: Callable[[], None]
    ) -> DeviceSteps | None:
        """The steps of the engine: those that `inputs` makes are to be recorded (None: none is), and `beat` is called
        after each. `host`: the second tier of each cache group, if there is one. Returns None where a step is over when
        `forward` returns, and nothing is recorded."""
