"""A GPU that hangs is not waited for longer than was said."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from allspan import Engine, SamplingParams
from allspan.protos.api.errors import DeadlineExceeded, Unavailable
from allspan.worker.backend.cuda.event_wait import EventWaiter
from allspan.worker.backend.cuda.sampling import DeviceStep
from allspan.worker.sampling.sampler import Sampler
from support.tiny_models import save_tiny


class Hanging:
    """An event that never happens."""

    def query(self) -> bool:
        return False


class Late:
    """An event that happens after some questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def hanging_step(waiter: EventWaiter) -> DeviceStep:
    tokens = torch.zeros(1, dtype=torch.int32)
    return DeviceStep(tokens, tokens, Hanging(), waiter, np.array([-1]), frozenset(), 8)  # type: ignore[arg-type]


def test_an_event_is_waited_for_until_it_happens() -> None:
    late = Late(3000)
    EventWaiter(10).wait(late)
    assert late.left == -1


def test_a_step_that_never_ends_is_given_up_with_advice() -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"not finished a step for 0.05 s \(watchdog_timeout\).* nvidia-smi"):
        hanging_step(EventWaiter(0.05)).result()
    assert time.monotonic() - started < 5


def test_requests_of_an_engine_whose_gpu_hangs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "llama")
    with Engine(tmp_path / "model", kernels="reference", max_model_len=64, watchdog_timeout=1) as engine:

        def sample(sampler: Sampler, *arguments: object) -> object:
            return hanging_step(EventWaiter(0.1)).result()

        monkeypatch.setattr(Sampler, "sample", sample)
        with pytest.raises(Unavailable, match="rank 0 has failed: the GPU has not finished a step for"):
            engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        with pytest.raises(Unavailable, match="the engine of rank 0 has failed"):
            engine.generate([[1, 2]], SamplingParams(max_tokens=2))
