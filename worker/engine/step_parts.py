"""What a device's backend makes for the steps of an engine, and the sizes that it makes them for."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.protos.config.settings import WorkerConfig
from allspan.worker.sampling.device import Sampling
from allspan.worker.scheduler.limits import most_logits_rows
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import InputBuffers


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a device's backend made for the steps of an engine; by default the host's."""

    inputs: InputBuffers | None = None
    sampling: Sampling | None = None


def batch_sizes(config: WorkerConfig, max_model_len: int) -> BatchSizes:
    """The sizes of a step of an engine with this configuration."""
    most = config.scheduler
    rows = most_logits_rows(most.max_num_seqs)
    return BatchSizes(most.max_num_seqs, most.max_num_batched_tokens, max_model_len, config.cache.page_size, rows)
