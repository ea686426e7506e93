"""EngineCores over the fake model, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from allspan.kernels.cuda.attention.cascade_rule import CascadeRule
from allspan.protos.api.errors import AllspanError
from allspan.protos.api.results import Output
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.backend.cpu.step_inputs import StepBuffers
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.cache.spec import ALL_TOKENS, PageLifetime
from allspan.worker.engine.core import EngineCore
from allspan.worker.parallel.base import Collectives, PlanChannel
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.scheduler.lookahead import DEPTH
from allspan.worker.scheduler.request import Request
from allspan.worker.scheduler.scheduler import Outcome
from allspan.worker.step.backend import StepParts
from allspan.worker.step.buffer_sizes import batch_sizes
from support.fake_model import FakeGpuModel, FakeModel, FakeTiers, OneTile

PAGE_SIZE = 4


def request(number: int, prompt: Sequence[int], **params: object) -> Request:
    """Greedy and seeded with its number unless told otherwise."""
    values = {"temperature": 0.0, "seed": number, **params}
    return Request(number.to_bytes(16, "little"), "client", tuple(prompt), SamplingParams(**values))  # type: ignore[arg-type]


class Collected:
    """What `on_outputs` was told, by request id; a second end of a request raises."""

    def __init__(self) -> None:
        self.outputs: dict[bytes, Output] = {}
        self.errors: dict[bytes, AllspanError] = {}

    def __call__(self, outcomes: list[Outcome]) -> None:
        for one, outcome in outcomes:
            request_id = one.request_id
            before = self.outputs.get(request_id, Output())
            if before.finish_reason or request_id in self.errors:
                raise AssertionError(f"{request_id.hex()} has ended already, now comes {outcome}")
            if isinstance(outcome, AllspanError):
                self.errors[request_id] = outcome
            else:
                self.outputs[request_id] = before.merged(outcome)

    def tokens(self, one: Request) -> list[int]:
        return list(self.outputs.get(one.request_id, Output()).token_ids)

    def reason(self, one: Request) -> str:
        return self.outputs.get(one.request_id, Output()).finish_reason


def config(**scheduler: Any) -> WorkerConfig:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **scheduler}
    return WorkerConfig(
        ModelConfig("fake", "fake"), ServiceConfig("-"), CacheConfig(page_size=PAGE_SIZE), SchedulerConfig(**sizes)
    )


def host_parts(
    settings: WorkerConfig, max_model_len: int, lifetimes: Sequence[PageLifetime] = (ALL_TOKENS,)
) -> StepParts:
    """Step buffers of the host and its sampling kernel, on one thread."""
    return StepParts(StepBuffers(batch_sizes(settings, max_model_len, lifetimes)), Sampling())


def fake_core(
    num_pages: int = 64,
    collected: Callable[[list[Outcome]], None] | None = None,
    eos: tuple[int, ...] = (),
    collectives: Collectives | None = None,
    channel: PlanChannel | None = None,
    widths: tuple[int, ...] = (97,),
    max_model_len: int = 64,
    num_host_pages: int = 0,
    **scheduler: Any,
) -> tuple[EngineCore, FakeModel]:
    world = collectives or LocalCollectives()
    model = FakeModel(num_pages, PAGE_SIZE, max_model_len, widths, world.rank)
    tiers = FakeTiers(model, num_host_pages) if num_host_pages else None
    settings = config(**scheduler)
    parts = host_parts(settings, max_model_len)
    core = EngineCore(settings, model, num_pages, world, parts, channel, eos, tiers)
    core.on_outputs = collected or Collected()
    return core, model


def fake_gpu_core(
    num_pages: int = 64,
    collected: Callable[[list[Outcome]], None] | None = None,
    eos: tuple[int, ...] = (),
    rule: CascadeRule | None = None,
    collectives: Collectives | None = None,
    channel: PlanChannel | None = None,
    depth: int = DEPTH,
    **scheduler: Any,
) -> tuple[EngineCore, FakeGpuModel]:
    """Its steps come as a GPU's, with lookahead of `depth` steps; every rank has whole rows of logits."""
    model, settings = FakeGpuModel(num_pages, PAGE_SIZE), config(**scheduler)
    buffers = DeviceBuffers(batch_sizes(settings, model.max_model_len), torch.device("cpu"), OneTile(), rule)
    world, parts = collectives or LocalCollectives(), StepParts(buffers, Sampling())
    with patch("allspan.worker.engine.core.DEPTH", depth):
        core = EngineCore(settings, model, num_pages, world, parts, channel, eos)
    core.on_outputs = collected or Collected()
    return core, model


def step_until_idle(core: EngineCore, most: int = 100_000) -> int:
    """Steps until there is nothing to do, checking the invariants after each; returns how many."""
    for count in range(most):
        if not core.step():
            core.check()
            return count
        core.check()
    raise AssertionError(f"still busy after {most} steps")
