"""CUDA graphs: the steps of a GPU are recorded before the first request, one for each size that others are padded
to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from allspan.worker.backend.cuda.event_wait import EventWaiter
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.step_layout import chunk_buckets
from allspan.worker.cache.tiers import HostPages
from allspan.worker.step.model import DeviceModel, Recording

logger = logging.getLogger(__name__)


class Graph:
    """A forward pass that a GPU has recorded: one launch runs it again, on whatever its inputs hold then.

    Calls `forward` twice: once for what must not be recorded (kernels are compiled, libraries take their memory), once
    to record it. It must look at nothing on the host and always use the same memory.
    """

    def __init__(self, forward: Callable[[], Tensor], pool: Any = None) -> None:
        """`pool`: where what it allocates lies; None: in memory of its own."""
        warmup: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            forward()
        torch.cuda.current_stream().wait_stream(warmup)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may read counters from the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = forward()

    @property
    def pool(self) -> Any:
        """Where what `forward` allocated lies."""
        return self._graph.pool()

    def replay(self) -> Tensor:
        """What `forward` returned: the same tensor each time."""
        self._graph.replay()
        return self._output


def record(forward: Callable[[], Tensor], others: Iterable[Recording]) -> Graph:
    """See `allspan.worker.step.model.Record`."""
    return Graph(forward, next((other.pool for other in others if isinstance(other, Graph)), None))


class CudaSteps:
    """See `allspan.worker.step.backend.DeviceSteps`."""

    def __init__(
        self,
        model: DeviceModel,
        inputs: DeviceBuffers | None,
        host: Sequence[HostPages],
        waiter: EventWaiter,
        beat: Callable[[], None],
    ) -> None:
        """`inputs` None: every step is launched op by op. `beat` is called after each step that was recorded."""
        self._model, self._inputs, self._host = model, inputs, host
        self._waiter, self._beat = waiter, beat

    def drain(self) -> None:
        self._waiter.drain()
        for pages in self._host:
            pages.drain()

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def capture(self) -> None:
        buffers = self._inputs
        if buffers is None:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        buffers.chunks = chunk_buckets(buffers.max_tokens)
        count = 0
        for inputs in buffers.paddings():
            self._model.capture(inputs, record)
            count += 1
            self._beat()
        torch.cuda.synchronize()
        logger.info(
            "captured %d steps: decode steps of %d sizes (1 to %d rows; %d also for rows that share tokens) and steps "
            "with prompts of %d (to %d tokens)%s in %.1f s, %.2f GiB",
            count,
            len(buffers.buckets),
            buffers.buckets[-1],
            len(buffers.shared_rows.buckets),
            len(buffers.chunks),
            buffers.chunks[-1],
            ", each with adapters and without," if buffers.has_adapters else "",
            time.monotonic() - started,
            max(0, free - torch.cuda.mem_get_info()[0]) / 2**30,
        )
