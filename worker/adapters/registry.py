"""AdapterRegistry: the adapters that a rank has loaded, those in slots and those in host memory alone."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import AllspanError, CheckpointError, InternalError, InvalidRequest, from_code
from allspan.protos.model_files.regular_file import Opener
from allspan.worker.adapters.allowed_paths import opener_below, resolved_folder
from allspan.worker.adapters.staged import Put, StagedAdapter, difference
from allspan.worker.parallel.agree import exchange
from allspan.worker.parallel.base import Collectives
from allspan.worker.process.thread_priority import lower_priority
from allspan.worker.step.side_copies import SideCopies

logger = logging.getLogger(__name__)

_WAITS, _READ = "waits", "read"
_NICENESS = 1
"""Behind the process's own: the reading thread gets a little less than half of a processor that a step wants, too. A
lower priority leaves it a few percent, and holds up steps no less, which wait for the interpreter while it has that."""


class SlotStore(Protocol):
    """The slots on the device; `allspan.worker.adapters.slots` has the real ones."""

    def stage(self, path: Path, goes_on: Callable[[], bool], opener: Opener, put: Put | None = None) -> StagedAdapter:
        """Reads a folder's files, each as `opener` opens it, beside steps; gives up once `goes_on` says no. With `put`
        its layers go there, one by one, and are not kept. Raises CheckpointError, and what `opener` raises."""

    def write(self, slot: int, staged: StagedAdapter) -> None:
        """Writes an adapter, or a layer of it, into a slot: on the thread of the steps in order behind them, or as the
        work of SideCopies into one that no step reads."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """An adapter that is being read."""

    module: AdapterModule
    slot: int
    task: Future[StagedAdapter]
    dropped: threading.Event


def drop_argument(adapter: int) -> bytes:
    """Returns the argument of DROP_ADAPTER."""
    return adapter.to_bytes(8, "little")


def load_argument(module: AdapterModule, slot: int) -> bytes:
    """Returns the argument of READ_ADAPTER. `slot`: where it goes, -1: to host memory until a request needs it."""
    return json.dumps({"slot": slot, **asdict(module)}).encode()


class AdapterRegistry:
    """Every rank's step loop calls `read`, `add`, `drop` and `place` at the same step, between two of them.

    A thread reads, checks and packs an adapter; `add` takes it in at one step, once all ranks have read theirs, or none
    does. So no step waits for a file, and all ranks have an adapter or none.
    """

    def __init__(
        self, slots: SlotStore, collectives: Collectives, lora_dir: str, keeps_copies: bool, copies: SideCopies
    ) -> None:
        """`keeps_copies`: adapters in slots stay in host memory, too, since another one may need their slot."""
        self.modules: dict[int, AdapterModule] = {}
        """The adapters by their digests, in the order in which they were loaded."""
        self._slots, self._collectives = slots, collectives
        self._lora_dir, self._keeps_copies, self._side = lora_dir, keeps_copies, copies
        self._copies: dict[int, StagedAdapter] = {}
        self._reading: _Reading | None = None
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._writing = threading.Lock()
        """Held by the reader while it writes: the slot of an adapter that is given up may be another one's next."""

    def take(self, module: AdapterModule, slot: int, staged: StagedAdapter, is_written: bool = False) -> None:
        """Takes an adapter in, which has its digest. `is_written`: it is in its slot already."""
        if slot >= 0 and not is_written:
            self._slots.write(slot, staged)
        if slot < 0 or self._keeps_copies:
            self._copies[module.digest] = staged
        self.modules[module.digest] = module

    def read(self, argument: bytes) -> None:
        """Begins to read an adapter; one whose reading has not ended is given up."""
        self._give_up()
        values = json.loads(argument)
        slot, dropped = values.pop("slot"), threading.Event()
        self._side.after_steps()
        module = AdapterModule(**values)
        task = self._reader.submit(self._stage, module, slot, dropped)
        self._reading = _Reading(module, slot, task, dropped)

    def wait(self, timeout: float) -> None:
        """Waits until this rank has read it, from any thread."""
        if (reading := self._reading) is not None:
            futures.wait([reading.task], timeout)

    def add(self) -> bool:
        """Takes in what was read, if all ranks have read it; whether they have. Raises, alike on every rank, what the
        first that could not read it says, and InvalidRequest where they have not read the same."""
        reading = self._reading
        if reading is None:
            raise InternalError("no adapter is being read")
        told = exchange(_state_of(reading.task), self._collectives)
        if (failure := _failure(told)) is not None:
            self._give_up()
            raise from_code(failure[0], f"the adapter {reading.module.name!r} cannot be loaded: {failure[1]}")
        if _WAITS in told:
            return False
        self._reading = None
        self._side.before_steps()
        self.take(reading.module, reading.slot, reading.task.result(), is_written=True)
        return True

    def drop(self, adapter: int) -> None:
        """Forgets an adapter that no request has, or gives up reading it; an unknown one is passed over."""
        self.modules.pop(adapter, None)
        self._copies.pop(adapter, None)
        if self._reading is not None and self._reading.module.digest == adapter:
            self._give_up()

    def place(self, slot: int, adapter: int) -> None:
        """Writes an adapter from host memory into a slot."""
        if (staged := self._copies.get(adapter)) is None:
            raise InternalError(f"the plan places adapter {adapter:#x}, which this rank does not have")
        self._slots.write(slot, staged)

    def _give_up(self) -> None:
        if self._reading is not None:
            with self._writing:
                self._reading.dropped.set()
            self._reading.task.cancel()
            self._side.before_steps()  # its slot may be written anew, in order behind them
        self._reading = None

    def _stage(self, module: AdapterModule, slot: int, dropped: threading.Event) -> StagedAdapter:
        """Reads an adapter, and brings it to the slot that is kept for it: layer by layer, where no copy is kept.
        Memory that is met for the first time would take longer than all the rest."""
        lower_priority(_NICENESS)
        path, opener = resolved_folder(module.path, self._lora_dir), opener_below(self._lora_dir)

        def put(tensors: Mapping[str, Tensor]) -> None:
            with self._writing:
                if not dropped.is_set():
                    self._side.run(lambda: self._slots.write(slot, StagedAdapter(tensors, "")))

        direct = put if slot >= 0 and not self._keeps_copies else None
        staged = self._slots.stage(path, lambda: not dropped.is_set(), opener, direct)
        if slot >= 0 and direct is None:
            put(staged.tensors)
        return staged


def _state_of(task: Future[StagedAdapter]) -> str:
    """What this rank tells the others: a code, and behind it what was read, or why it could not be."""
    if not task.done():
        return _WAITS
    error = task.exception()
    if error is None:
        return f"{_READ}\n{task.result().checksum}"
    if type(error) is CheckpointError or isinstance(error, OSError):  # of the caller's folder
        return f"{InvalidRequest.code}\n{error}"
    if isinstance(error, AllspanError):
        return f"{error.code}\n{error.message}"
    logger.error("an adapter cannot be read", exc_info=error)
    return f"{InternalError.code}\n{type(error).__name__}: {error}"


def _failure(told: Sequence[str]) -> tuple[str, str] | None:
    """The code and the message of the first rank that could not read an adapter, or for ranks that read different ones;
    None where there is nothing, yet."""
    states = [(code, message) for code, _, message in (each.partition("\n") for each in told)]
    for rank, (code, message) in enumerate(states):
        if code not in (_READ, _WAITS):
            return code, message if len(told) == 1 else f"rank {rank}: {message}"
    if _WAITS not in told and (problem := difference([checksum for _, checksum in states])):
        return InvalidRequest.code, problem
    return None
