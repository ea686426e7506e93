"""What a step costs beside the model: scheduler, plan, its encoding, the batch's inputs, sampling and bookkeeping.

    python -m allspan.worker.tools.step_overhead [--batch 1 64] [--vocab 49152] [--steps 1000] [--threads 1]

prints one line of JSON a batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from allspan.kernels.table import op_set
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.backend.cpu.step_inputs import StepBuffers
from allspan.worker.engine.core import EngineCore
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.kernel import sampling_kernel
from allspan.worker.scheduler.request import Request
from allspan.worker.step.backend import StepParts
from allspan.worker.step.buffer_sizes import batch_sizes
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.row_inputs import RowInputs

_MODEL_LEN = 4096
_PAGE_SIZE = 32
_WARM_STEPS = 20


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Milliseconds of a decode step outside the model."""

    batch: int
    vocab_size: int
    median_ms: float
    p99_ms: float


class NullModel:
    """Meets `allspan.worker.step.model.StepModel` and does nothing: its logits are the same at every step."""

    max_model_len = _MODEL_LEN
    row_inputs = RowInputs()

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.vocab_widths = (vocab_size,)
        self._logits = torch.randn(max_rows, vocab_size)

    def forward(self, inputs: StepInputs) -> Tensor:
        return self._logits[: inputs.logits_rows.shape[0]]

    def hidden_states(self, rows: Sequence[int]) -> Tensor:
        raise NotImplementedError("the model has none")

    def stream(self, inputs: StepInputs) -> Tensor:
        raise NotImplementedError


class NullChannel:
    """Meets `allspan.worker.parallel.base.PlanChannel`, and discards what is published."""

    def publish(self, data: bytes) -> None:
        pass

    def receive(self, timeout: float) -> bytes | None:
        return None

    def expect(self) -> None:
        pass

    def close(self) -> None:
        pass


def measure(batch: int, steps: int = 1000, vocab_size: int = 49152, threads: int = 1) -> HostOverhead:
    """Decodes `batch` greedy requests at once for `steps` steps, at most 4000, in this process. `threads` sample."""
    core = _core(batch, vocab_size, threads)
    total = steps + _WARM_STEPS + 10
    for number in range(batch):
        params = SamplingParams(max_tokens=total, temperature=0.0, seed=number, ignore_eos=True)
        prompt = tuple((number * 31 + i) % vocab_size for i in range(64))
        core.submit(Request(number.to_bytes(16, "little"), "overhead", prompt, params))
    while core.statistics().generated_tokens < batch:
        core.step()
    for _ in range(_WARM_STEPS):
        core.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        core.step()
        times.append(1e3 * (time.perf_counter() - started))
    times.sort()
    return HostOverhead(batch, vocab_size, statistics.median(times), times[int(len(times) * 0.99)])


def _core(batch: int, vocab_size: int, threads: int) -> EngineCore:
    config = WorkerConfig(
        ModelConfig("null", "null"),
        ServiceConfig("-"),
        CacheConfig(page_size=_PAGE_SIZE),
        SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(512, batch)),
    )
    num_pages = batch * _MODEL_LEN // _PAGE_SIZE
    model = NullModel(vocab_size, max(batch, 64))
    sizes = batch_sizes(config, model.max_model_len)
    parts = StepParts(StepBuffers(sizes), Sampling(sampling_kernel(op_set("auto", threads).runtime)))
    return EngineCore(config, model, num_pages, LocalCollectives(), parts, NullChannel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    for batch in given.batch:
        print(json.dumps(asdict(measure(batch, given.steps, given.vocab, given.threads))))


if __name__ == "__main__":
    main()
