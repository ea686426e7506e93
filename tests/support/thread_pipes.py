"""A pipeline whose ranks are threads of this process: `allspan.worker.parallel.base.Pipe` without MPI."""

from __future__ import annotations

import queue
from typing import Any

from torch import Tensor

from allspan.worker.parallel.base import Collectives, GroupCapabilities, PlanChannel, Words
from allspan.worker.parallel.local import LocalCollectives
from support.threads import ThreadWorld


class ThreadPipe:
    def __init__(self, pipeline: ThreadPipeline, stage: int, number: int, whole: Collectives) -> None:
        self.stage, self.num_stages, self.whole = stage, pipeline.stages, whole
        self._pipeline, self._number = pipeline, number
        self.most_ahead = 0
        """The most steps whose activations waited for the next stage."""

    def send(self, x: Tensor) -> None:
        waiting = self._queue("activations", self.stage + 1)
        waiting.put(x.clone())
        self.most_ahead = max(self.most_ahead, waiting.qsize())

    def receive(self, out: Tensor) -> None:
        out.copy_(self._queue("activations", self.stage).get(timeout=20))

    def give(self, words: Words) -> None:
        for stage in range(self.num_stages - 1):
            self._queue("results", stage).put(words.copy())

    def take(self, count: int) -> Words:
        words: Words = self._queue("results", self.stage).get(timeout=20)
        assert len(words) == count
        return words

    def _queue(self, kind: str, stage: int) -> queue.Queue[Any]:
        return self._pipeline.queues.setdefault((kind, stage, self._number), queue.Queue())


class ThreadPipeline:
    """`collectives(r)` and `channels[r]` belong to rank r; rank r is number r % width of stage r // width."""

    def __init__(self, stages: int, width: int = 1) -> None:
        self.stages, self.width = stages, width
        self.world = ThreadWorld(stages * width)
        self._rows = [ThreadWorld(width) for _ in range(stages)]
        self.queues: dict[tuple[str, int, int], queue.Queue[Any]] = {}
        self.channels: list[PlanChannel] = list(self.world.channels)
        self.pipes = [
            ThreadPipe(self, rank // width, rank % width, self.world.collectives[rank])
            for rank in range(stages * width)
        ]

    def collectives(self, rank: int) -> Collectives:
        stage, number = divmod(rank, self.width)
        own: Any = self._rows[stage].collectives[number] if self.width > 1 else LocalCollectives()
        own.capabilities = GroupCapabilities(pipe=self.pipes[rank])
        return own  # type: ignore[no-any-return]
