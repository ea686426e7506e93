"""step_times: how long steps take by their tokens, measured before the first one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from allspan.worker.parallel.base import Collectives, all_ranks
from allspan.worker.scheduler.limits import Limits
from allspan.worker.step.inputs import StepInputs

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ROUNDS = 16
LEAST_STEPS, MOST_SECONDS = 4, 3.0
"""The steps that are timed at least, and the seconds after which no more are."""
CONTEXT, CONTEXT_SECONDS = 512, 0.5
"""Tokens behind which steps are timed, as requests have them: attention makes each further row dearer. Fewer where
taking them in would take longer than these seconds."""


class Timed(Protocol):
    """What is timed: a StepModel, or a draft head."""

    def forward(self, inputs: StepInputs) -> Tensor: ...


def step_times(
    trial: Callable[[int, int], StepInputs],
    model: Timed,
    max_model_len: int,
    collectives: Collectives,
    limits: Limits,
    to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
) -> dict[int, float]:
    """Returns for some numbers of tokens of one request the seconds of a forward pass on the slowest rank: the least of
    several rounds, and of large numbers only where there is time. All ranks call it at once. Keys and values go into
    pages that nobody has yet. `trial` makes the inputs of so many tokens behind so many others. `max_model_len`: tokens
    of a request that the model is made for. `to_host` waits for a device (`Sampling.to_host`)."""
    held = min(group.num_pages for group in limits.groups()) * limits.page_size
    most = min(limits.max_chunk_tokens, limits.max_logits_rows, max_model_len - 1, held)
    sizes = [size for size in SIZES if size <= most]
    found: dict[int, float] = {}
    began, context = time.perf_counter(), 0
    while context + 2 * most <= min(CONTEXT + most, max_model_len - 1, held):
        to_host(model.forward(trial(most, context))[:, :1])
        context += most
        if _slowest([time.perf_counter() - began], collectives)[0] > CONTEXT_SECONDS:
            break
    for number, size in enumerate(sizes * ROUNDS, 1):
        inputs = trial(size, context)
        started = time.perf_counter()
        to_host(model.forward(inputs)[:, :1])
        found[size] = min(found.get(size, math.inf), time.perf_counter() - started)
        elapsed = _slowest([time.perf_counter() - began], collectives)[0]  # so that all ranks stop at the same one
        if number >= LEAST_STEPS and elapsed > MOST_SECONDS:
            break
    return dict(zip(found, _slowest(list(found.values()), collectives), strict=True))


def _slowest(seconds: list[float], collectives: Collectives) -> list[float]:
    """The largest of all ranks, each."""
    world = all_ranks(collectives)
    mine = torch.tensor([[min(int(each * 1e6), 2**31 - 1) for each in seconds]], dtype=torch.int32)
    everyone = torch.empty((world.size, len(seconds)), dtype=torch.int32)
    world.all_gather_rows(mine, everyone)
    return [each / 1e6 for each in everyone.max(0).values.tolist()]
