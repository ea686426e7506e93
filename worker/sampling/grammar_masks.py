"""The masks of grammars for the rows of a step: made on a thread of their own while its forward pass runs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.abi.sampling import ALL_MASKED
from allspan.worker.process.host import run_on
from allspan.worker.sampling.grammar import CompiledGrammar, GrammarRow, SeenMasks
from allspan.worker.sampling.result import Rows

WAIT_S = 5.0
"""The masks of a step are waited for this long once its logits are there. A row whose mask is not made by then
fails."""
_REMEMBERED = 4096
"""The number of masks whose times are kept."""

logger = logging.getLogger(__name__)


class GrammarMasks:
    """The grammars of those rows that have one, and the masks that a step needs of them."""

    def __init__(self, vocab_size: int, maker: MaskMaker, on_host: bool, share: tuple[int, int] = (0, 1)) -> None:
        """`on_host`: logits are changed on the host, by ids. `share`: the first of a step's rows of logits that this
        rank samples, and the distance to its next one."""
        self._maker = maker
        self._rows: dict[int, GrammarRow] = {}
        self._seen = SeenMasks(vocab_size)
        self._on_host = on_host
        self._first, self._step = share

    def add(
        self,
        row: int,
        grammar: CompiledGrammar,
        tokens: NDArray[np.int32],
        prompt_len: int,
        ends: Iterable[int],
        first_end: int,
    ) -> GrammarRow:
        """Returns the logits processor of a row that begins; the arguments are those of `GrammarRow`."""
        self._rows[row] = GrammarRow(grammar, tokens, prompt_len, ends, self._seen, first_end, self._on_host)
        return self._rows[row]

    def remove(self, row: int) -> None:
        """The row has ended."""
        self._rows.pop(row, None)

    def begin_drafts(self, row: int, position: int) -> None:
        """The row's tokens from `position` on are drafts, until `retract`."""
        if grammar := self._rows.get(row):
            grammar.begin_drafts(position)

    def retract(self, row: int, position: int) -> None:
        """Drafts of the row have been verified: its tokens before `position` hold."""
        if grammar := self._rows.get(row):
            grammar.retract(position)

    def begin(self, rows: Rows, positions: Rows, targets: Rows | None) -> None:
        """Begins the masks of a step's rows of logits, before these are there; returns at once."""
        if not self._rows:
            return
        mine: dict[GrammarRow, int] = {}
        for i in range(self._first, len(rows), self._step):
            if (grammar := self._rows.get(int(rows[i]))) and (targets is None or targets[i] < 0):
                mine.setdefault(grammar, int(positions[i]))  # those behind drafts are made one after the other
        if mine:
            self._maker.begin(list(mine.items()))

    def wait(self) -> None:
        """Waits until the masks that were begun are made, or have failed."""
        self._maker.wait()

    def verdict(self, row: int) -> int:
        """Returns why no token is left for the row: the grammar's reason, or ALL_MASKED where it has none."""
        grammar = self._rows.get(row)
        return grammar.verdict if grammar else ALL_MASKED


class MaskMaker:
    """Makes the masks of a step's rows while its forward pass runs: one thread, begun when first needed."""

    def __init__(self, cpus: Sequence[int] = ()) -> None:
        """`cpus`: where the thread may run; a thread begins where the one that starts it is pinned."""
        self._cpus = tuple(cpus)
        self._executor: ThreadPoolExecutor | None = None
        self._job: _Job | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._waited_s = 0.0

    def begin(self, rows: list[tuple[GrammarRow, int]]) -> None:
        """Rows, and the positions of their masks."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "masks", run_on, (self._cpus,))
        self._job = _Job(rows, self._seconds)
        self._count += len(rows)
        self._executor.submit(self._job.run)

    def wait(self) -> None:
        """Waits until those that were begun are made. The row that keeps the others waiting for too long fails; those
        behind it are made when they are used."""
        job, self._job = self._job, None
        if job is None:
            return
        started = time.perf_counter()
        in_time = job.is_done.wait(WAIT_S)
        self._waited_s += time.perf_counter() - started
        if in_time:
            return
        late = job.abandon()
        if late is not None:
            late[0].fail(late[1], f"its mask was not made within {WAIT_S:g} s")
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._executor = None

    def summary(self) -> dict[str, float]:
        """Masks made here, the seconds that the sampler waited for them, and how long the last of them took each."""
        seconds = sorted(self._seconds.copy())
        found = {"masks": float(self._count), "waited_s": self._waited_s}
        if seconds:
            for name, share in (("median_s", 0.5), ("p90_s", 0.9), ("p99_s", 0.99), ("most_s", 1.0)):
                found[name] = seconds[min(int(share * len(seconds)), len(seconds) - 1)]
        return found


class _Job:
    """The masks of one step."""

    def __init__(self, rows: list[tuple[GrammarRow, int]], seconds: deque[float]) -> None:
        """`seconds` collects how long each mask took."""
        self.is_done = threading.Event()
        self._rows = rows
        self._seconds = seconds
        self._lock = threading.Lock()
        self._current: tuple[GrammarRow, int] | None = None
        self._is_abandoned = False

    def run(self) -> None:
        try:
            for row, position in self._rows:
                with self._lock:
                    if self._is_abandoned:
                        return
                    self._current = row, position
                started = time.perf_counter()
                row.make(position)
                self._seconds.append(time.perf_counter() - started)
        except Exception:
            logger.exception("the masks of a step were not made")  # using them raises it again
        finally:
            self.is_done.set()

    def abandon(self) -> tuple[GrammarRow, int] | None:
        """No further row is begun; the one that is being made."""
        with self._lock:
            self._is_abandoned = True
            return self._current
