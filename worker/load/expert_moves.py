"""ExpertMoves: experts change ranks while the model serves, a layer at a time."""

from __future__ import annotations

import functools
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.packer import Packer
from allspan.protos.api.errors import AllspanError, CheckpointError, DeadlineExceeded, Unavailable
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.config.settings import ModelConfig
from allspan.worker.load.expert_placements import mixtures
from allspan.worker.load.loader import CheckpointWeights
from allspan.worker.models.model import Model
from allspan.worker.models.pieces import EP
from allspan.worker.models.placement import Placement, balanced
from allspan.worker.parallel.base import Collectives, all_ranks
from allspan.worker.process.thread_priority import lower_priority
from allspan.worker.scheduler.plan import Operation

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.02
"""A layer whose busiest group of ranks would lose a smaller share of its tokens stays as it is."""
POLL_S = 0.05
_NICENESS = 10
"""The thread that reads gets this niceness above the process's own: steps come first."""
_WAITS, _READY, _FAILED = range(3)

Staged = list[tuple[Tensor, Tensor]]
"""Where a tensor of an expert goes, and what goes there."""
Move = tuple[int, Placement, tuple[int, ...]]
"""A layer, its new placement, and the counts of its experts' tokens by which that was chosen."""


class ExpertMoves:
    """Every rank's step loop calls `begin` and `advance` at the same step, between two of them; the leader calls
    `rebalance`, which has that done, from another thread.

    Between these steps a thread of each rank chooses placements, and reads the weights that its places are to hold,
    into memory of their own.
    A layer switches at one step, once all ranks have read theirs. So no step waits for a file, and a rank that dies
    meanwhile ends the world as at any other time: the next one places experts as its configuration says.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        collectives: Collectives,
        open_weights: Callable[[], CheckpointWeights],
        packer: Packer,
    ) -> None:
        """`open_weights` opens what the weights were read from last; `packer` must not be the one of the steps."""
        self._model, self._config, self._collectives = model, config, collectives
        self._open, self._holding = open_weights, replace(model.holding, packer=packer)
        self._before: dict[int, tuple[int, ...]] = {}
        self._opened = open_weights
        self._queue: deque[Move] = deque()
        self._planning: Future[list[Move]] | None = None
        self._staging: Future[Staged] | None = None
        self._dropped = threading.Event()
        self._reader = ThreadPoolExecutor(1, "experts")
        self._one_call = threading.Lock()
        self.num_left, self._failure = 0, ""

    def rebalance(self, operate: Callable[[Operation, float], None], timeout: float) -> None:
        """Leader: places experts by the tokens since the last call. Returns once all layers have switched. Raises
        DeadlineExceeded after `timeout` seconds, with some layers switched and others not, Unavailable without ranks
        that have experts of their own, and what `operate` raises."""
        deadline = time.monotonic() + timeout

        def left() -> float:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise DeadlineExceeded(f"experts have not all moved within {timeout:g} s; call again to go on")
            return seconds

        if not self._one_call.acquire(timeout=left()):
            raise DeadlineExceeded(f"another call has not moved its experts within {timeout:g} s; call again to go on")
        try:
            operate(Operation.REBALANCE_EXPERTS, left())
            while self.num_left:
                task: Future[Any] | None = self._planning or self._staging
                if task is not None:
                    futures.wait([task], left())
                operate(Operation.SWITCH_EXPERTS, left())
                if (self._planning or self._staging) is task:  # another rank is not as far
                    time.sleep(min(POLL_S, left()))
            if self._failure:
                raise Unavailable(self._failure)
        finally:
            self._one_call.release()

    def begin(self) -> None:
        """Takes the counts by which placements are chosen. Raises, alike on every rank, Unavailable."""
        self.drop("")
        groups = self._model.holding.shard.groups[EP].size
        if groups == 1:
            raise Unavailable("no rank has experts of its own to exchange: start with --enable-expert-parallel")
        self._opened = functools.cache(self._open)
        self._planning = self._reader.submit(self._choose, self._model.expert_loads(), groups)
        self.num_left = 1

    def advance(self) -> None:
        """Switches the next layer, if all ranks have read it. Raises, alike on every rank, CheckpointError, and
        Unavailable for ranks that have chosen differently."""
        planning, staging = self._planning, self._staging
        task: Future[Any] | None = planning or staging
        state, left = _READY if task is None else _state_of(task), len(self._queue)
        chosen = planning.result() if planning is not None and state == _READY else []
        digest = zlib.crc32(repr([move[:2] for move in chosen]).encode()) & 0x7FFFFFFF
        told = self._gather([state, left or len(chosen), digest])
        states = told[:, 0].tolist()
        if _FAILED in states:
            self.drop("")
            raise CheckpointError(
                f"rank {states.index(_FAILED)} could not read experts, its log says why; none move now"
            )
        if _WAITS in states:
            return
        self.num_left = int(told[:, 1].max())
        if planning is not None:
            of_stages = told.view(-1, self._collectives.size, 3)
            if (of_stages != of_stages[:, :1]).any():
                self.drop("")
                raise Unavailable("the ranks have counted the tokens of experts differently: nothing has moved")
            self._planning = None
            self._queue.extend(chosen)
            self._stage()
            return
        if staging is not None:
            layer, placement, counts = self._queue.popleft()
            for target, staged in staging.result():
                target.copy_(staged)
            self._model.place_experts(layer, placement)
            self._before[layer] = counts  # only now: what breaks off is chosen by the same tokens the next time
            self._stage()
        self.num_left = max(0, self.num_left - 1)  # none, where they were dropped meanwhile

    def drop(self, why: str) -> None:
        """Gives up what is not switched yet; `rebalance` raises Unavailable if there is a reason."""
        self._dropped.set()
        self._dropped = threading.Event()
        self._queue.clear()
        self._failure = why if self.num_left else ""
        self._planning, self._staging, self.num_left = None, None, 0

    def _choose(self, loads: Sequence[ExpertLoad], groups: int) -> list[Move]:
        """The layers that gain from another placement, and theirs: the same on all ranks that share the layers, which
        have counted the same tokens."""
        chosen: list[Move] = []
        for load in loads:
            before = self._before.get(load.layer, (0,) * len(load.tokens))
            tokens = [now - then for now, then in zip(load.tokens, before, strict=True)]
            now = self._holding.placement(load.layer, len(tokens))
            new = self._balanced(load.layer, tokens, groups).moved_from(now, self._config.expert_nodes)
            if max(new.tokens(tokens)) < (1 - LEAST_GAIN) * max(now.tokens(tokens)):
                chosen.append((load.layer, new, load.tokens))
            else:
                self._before[load.layer] = load.tokens
        return chosen

    def _balanced(self, layer: int, tokens: Sequence[int], groups: int) -> Placement:
        expert_groups = mixtures(self._holding.spec)[layer].router.groups
        return balanced(tokens, groups, self._config.redundant_experts, self._config.expert_nodes, expert_groups)

    def _stage(self) -> None:
        """Begins to read what the next layer's new places hold."""
        self._staging = None
        if self._queue:
            self._staging = self._reader.submit(self._read, *self._queue[0][:2], self._opened, self._dropped)

    def _read(
        self, layer: int, placement: Placement, opened: Callable[[], CheckpointWeights], dropped: threading.Event
    ) -> Staged:
        lower_priority(_NICENESS)
        holding, group = self._holding, self._holding.shard.groups[EP].rank
        held = holding.placement(layer, len(placement.copies)).groups[group]
        places = [place for place, expert in enumerate(placement.groups[group]) if held[place] != expert]
        staged: Staged = []
        if not places:
            return staged
        read_from = opened()
        holding = replace(holding, weights=read_from.holding.weights)  # a reload may have found other names
        for piece in holding.expert_pieces(layer):
            for place in places:
                if dropped.is_set():
                    return []
                weights = {name: self._model.weights[name][place] for name in holding.tensors(piece)}
                read = holding.read_expert(piece, placement.groups[group][place], read_from.checkpoint, weights)
                staged += [(weights[name], tensor) for name, tensor in read.items()]
            read_from.checkpoint.release()
        return staged

    def _gather(self, values: Sequence[int]) -> Tensor:
        """int32 [ranks of all stages, values]."""
        world = all_ranks(self._collectives)
        everyone = torch.empty((world.size, len(values)), dtype=torch.int32)
        world.all_gather_rows(torch.tensor([list(values)], dtype=torch.int32), everyone)
        return everyone


def rebalance_regularly(rebalance: Callable[[float], None], interval: float, ended: threading.Event) -> None:
    """Calls `rebalance` every `interval` seconds until the end, with that much time. What it raises is logged, with a
    traceback what nobody foresaw: the next call may find the weights loaded and files readable again."""
    while not ended.wait(interval):
        try:
            rebalance(interval)
        except AllspanError as error:
            logger.warning("experts are not rebalanced, which is tried again in %g s: %s", interval, error.message)
        except Exception:
            logger.exception("experts are not rebalanced, which is tried again in %g s", interval)


def _state_of(task: Future[Any]) -> int:
    if not task.done():
        return _WAITS
    if (error := task.exception()) is None:
        return _READY
    logger.error("experts cannot be moved to this rank: %s", error, exc_info=error)
    return _FAILED
