"""A world whose ranks are a grid of stages x tensor-parallel ranks: rank r is number r % T of stage r // T.

Ranks of a stage share its layers and have collectives of their own. Ranks of equal number are a pipe: activations go
from each stage to the next over plain MPI, and what the last one samples goes to all others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import ParallelConfig
from allspan.worker.parallel.base import Collectives, Words
from allspan.worker.parallel.hosts import SplitHosts
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.parallel.mpi import MpiCollectives, MpiPlanChannel, wait
from allspan.worker.parallel.world import DeviceCollectives, MpiWorld

_ACTIVATIONS, _RESULTS = 1, 2
"""Tags of messages."""


_PIECE = 15_000
"""The most elements of a message. It is sent without a handshake, for which the sender would have to call MPI: but it
computes its next step."""


def _pieces(values: Any) -> list[Any]:
    return [values[first : first + _PIECE] for first in range(0, len(values), _PIECE)]


class MpiPipe:
    """See `allspan.worker.parallel.base.Pipe`. Messages are copied and left to MPI; those that have gone are let go of
    when the next one is sent."""

    def __init__(self, comm: Any, whole: Collectives, timeout: float) -> None:
        """The ranks of `comm` are the stages in their order."""
        self.stage: int = comm.rank
        self.num_stages: int = comm.size
        self.whole = whole
        self._comm = comm
        self._timeout = timeout
        self._sent: deque[tuple[Any, Any]] = deque()
        """Requests with the bytes that they send."""

    def send(self, x: Tensor) -> None:
        for piece in _pieces(x.numpy().reshape(-1).copy()):
            self._send(piece, MPI.FLOAT, self.stage + 1, _ACTIVATIONS)

    def receive(self, out: Tensor) -> None:
        before = self.stage - 1
        pieces = _pieces(out.numpy().reshape(-1))
        for request in [self._comm.Irecv([each, MPI.FLOAT], source=before, tag=_ACTIVATIONS) for each in pieces]:
            self._wait(request, f"receive from stage {before}")

    def give(self, words: Words) -> None:
        for stage in range(self.num_stages - 1):
            self._send(words, MPI.INT32_T, stage, _RESULTS)

    def take(self, count: int) -> Words:
        words = np.empty(count, dtype=np.int32)
        last = self.num_stages - 1
        self._wait(self._comm.Irecv([words, MPI.INT32_T], source=last, tag=_RESULTS), f"take from stage {last}")
        return words

    def close(self) -> None:
        """Every rank calls it, after the last message was received."""
        while self._sent:
            self._wait(self._sent.popleft()[0], "close")

    def _send(self, data: Any, kind: Any, stage: int, tag: int) -> None:
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        self._sent.append((self._comm.Isend([data, kind], dest=stage, tag=tag), data))

    def _wait(self, request: Any, what: str) -> None:
        wait(request, self._timeout, what, self._comm)


class PipelineWorld(MpiWorld):
    """The ranks that one mpirun started, in stages."""

    def __init__(
        self, config: ParallelConfig, on_device: DeviceCollectives | None, mpi: Any, split: SplitHosts
    ) -> None:
        """Raises ConfigError for ranks that do not divide into as many stages."""
        self._mpi = mpi
        self._comm = self._mpi.COMM_WORLD
        self._config = config
        self.rank, self.size = self._comm.rank, self._comm.size
        stages = config.pipeline_parallel_size
        if self.size % stages:
            raise ConfigError(f"pipeline_parallel_size is {stages}, which does not divide {self.size} ranks")
        width, timeout = self.size // stages, config.timeout_s
        own: Any
        if width == 1:
            own, self.kind = LocalCollectives(), "pipeline"
        else:
            stage = MpiWorld(config, on_device, split, self._comm.Split(self.rank // width, self.rank))
            own, self.kind = stage.groups["tp"], f"{stage.kind} in a pipeline"
        whole = MpiCollectives(self._comm.Dup(), timeout, "world")
        self._pipe = MpiPipe(self._comm.Split(self.rank % width, self.rank), whole, timeout)
        own.capabilities = replace(own.capabilities, pipe=self._pipe)
        self.channel = MpiPlanChannel(self._comm.Dup(), timeout)
        self.groups = dict.fromkeys(("tp", "ep", "dp"), own)

    def close(self) -> None:
        self._pipe.close()
        super().close()
