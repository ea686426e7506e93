"""A row whose output must stay in a grammar: before each draw, a mask of the tokens that may come next.

The library that knows grammars stands behind `CompiledGrammar` and `Matcher`. A matcher reads the row's tokens up to
the position that is sampled, however many those are, so a rank that samples its share of the steps only, a request that
was preempted and one that another world began all come out alike. Ends are ours: where the text is whole, and only
there, the model's end-of-sequence ids and the request's own stop ids may be sampled. Where nothing but the end may
come, and no id may be sampled that tells it (`ignore_eos`, or a model without one), the row gets GRAMMAR_ENDED.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.abi.sampling import ALL_MASKED
from allspan.worker.process.host import run_on
from allspan.worker.sampling.failure import GRAMMAR_ENDED, GRAMMAR_FAILED
from allspan.worker.sampling.processor import DeviceChange, Logits

Words = NDArray[np.int32]

WAIT_S = 5.0
"""For the masks of a step once its logits are there. A row whose mask is not made by then fails."""
FIRST_ALLOWANCE_S, TOKEN_ALLOWANCE_S = 1.0, 0.005
"""Of a processor, for a row's masks: in all so much, and so much for each of its tokens. It is a hundred times what
common grammars take; one that needs more would hold up everybody's steps, and fails."""
_BITS = np.arange(32)
_MOST_MASKS, _MOST_IDS = 256, 16_384
"""Kept, of so many ids at most."""
_REMEMBERED = 4096
"""Times of masks."""

logger = logging.getLogger(__name__)


class MatcherFailed(Exception):
    """A matcher cannot go on: its grammar exceeds a limit, or a token was not of its language."""


class Matcher(Protocol):
    """How far one output has come in its grammar. Used by one thread at a time."""

    def consume(self, token_ids: list[int]) -> None:
        """The output's next tokens. Raises MatcherFailed."""

    def accepts(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first on, may come next. Consumes none."""

    def rollback(self, count: int) -> None:
        """Takes the last tokens back. Raises MatcherFailed."""

    def fill(self, mask: Words) -> bool:
        """Writes which tokens may come next: token i is bit i % 32 of mask[i // 32]. Ends and ids without a text are
        not among them. Returns whether the text is whole. Raises MatcherFailed."""


class CompiledGrammar(Protocol):
    """Shared by all requests of this grammar; safe from any thread."""

    def matcher(self) -> Matcher:
        """A new one, at the beginning of an output. Those of a grammar share what they have learnt of it; so what one
        needs may fail for all that others have needed."""

    def own_matcher(self) -> Matcher:
        """A new one that shares nothing with those before; nor do those after. Raises MatcherFailed."""


def mask_of(ids: Iterable[int], vocab_size: int) -> Words:
    """[⌈vocab_size / 32⌉]: with these bits."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class SeenMasks:
    """The ids of masks. Most come again and again (within a string, before a key), in every row of a grammar."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._kept: dict[bytes, tuple[NDArray[np.int64], bool]] = {}

    def ids_of(self, mask: Words) -> tuple[NDArray[np.int64], bool]:
        """Which ids are in it, and True; or where these are many, those that are not, and False."""
        key = mask.tobytes()
        found = self._kept.get(key)
        if found is None:
            found = self._find(mask)
            if len(self._kept) >= _MOST_MASKS:
                self._kept.clear()
            if len(found[0]) <= _MOST_IDS:
                self._kept[key] = found
        return found

    def _find(self, mask: Words) -> tuple[NDArray[np.int64], bool]:
        mixed = np.flatnonzero(mask)
        if 4 * len(mixed) <= len(mask):  # most words are 0, and need no look
            few = np.unpackbits(mask[mixed].view(np.uint8), bitorder="little").view(np.bool_).reshape(-1, 32)
            return (32 * mixed[:, None] + _BITS)[few], True
        banned = np.unpackbits((~mask).view(np.uint8), count=self.vocab_size, bitorder="little")
        return np.flatnonzero(banned), False


class GrammarRow:
    """The logits processor of a grammar. `MaskMaker` may make its mask ahead, on another thread."""

    needs_tokens = True

    def __init__(
        self,
        grammar: CompiledGrammar,
        tokens: Words,
        prompt_len: int,
        ends: Iterable[int],
        seen: SeenMasks,
        first_end: int = 0,
        on_host: bool = True,
    ) -> None:
        """`tokens`: the row's, prompt and output, kept up to date by its owner. `ends`: what may be sampled where the
        text is whole. `seen`: of this vocabulary, shared by the rows. `first_end`: the first position where the request
        may end. `on_host`: logits are changed here, by ids that are found with the mask; a device takes its bits."""
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._is_own = False
        """Whether the matcher shares nothing."""
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._consumed = prompt_len
        self._ends = mask_of(ends, seen.vocab_size)
        self._seen = seen
        self._first_end = first_end
        self._mask = np.zeros_like(self._ends)
        self._ids: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._are_allowed = True
        """`_ids` are what may be sampled, not what may not."""
        self._on_host = on_host
        self._has_ids = False
        """`_ids` are those of the mask."""
        self._position = -1
        """The mask's."""
        self._is_whole = False
        self._first_draft = len(tokens)
        """From this position on, tokens are drafts."""
        self._failure = ""
        self._spent_s = 0.0

    def make(self, position: int) -> None:
        """The mask for `position`. Idempotent."""
        if self._failure or self._position == position:
            return
        started = time.thread_time()
        try:
            try:
                self._advance(position)
            except MatcherFailed:
                if self._is_own:
                    raise
                self._matcher, self._is_own = self._grammar.own_matcher(), True
                self._consumed = self._prompt_len
                self._advance(position)
        except MatcherFailed as error:
            self.fail(position, str(error))
            return
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also what a library's panic is raised as: it is this row's trouble alone
            self.fail(position, f"{type(error).__name__}: {error}")
            return
        if self._failure:  # it came too late
            return
        self._prepare()
        self._position = position
        self._spent_s += time.thread_time() - started
        allowed_s = FIRST_ALLOWANCE_S + TOKEN_ALLOWANCE_S * (position - self._prompt_len)
        if self._spent_s > allowed_s:
            self.fail(position, f"its masks took {self._spent_s:.2f} s of a processor, {allowed_s:.2f} s are allowed")

    def begin_drafts(self, position: int) -> None:
        """Tokens from `position` on are drafts, which need not be of the grammar's language."""
        self._first_draft = position

    def retract(self, position: int) -> None:
        """Of the tokens that were read, those before `position` hold, and none is a draft any more."""
        self._first_draft, self._position = len(self._tokens), -1
        if self._failure or self._consumed <= position:
            return
        try:
            self._matcher.rollback(self._consumed - position)
            self._consumed = position
        except MatcherFailed:
            self._matcher, self._consumed = self._grammar.matcher(), self._prompt_len

    def _advance(self, position: int) -> None:
        drafts = self._tokens[max(self._consumed, self._first_draft) : position].tolist()
        if drafts:
            certain = self._tokens[self._consumed : position - len(drafts)].tolist()
            self._matcher.consume(certain)
            self._consumed += len(certain)
            if self._matcher.accepts(drafts) < len(drafts):  # what is sampled behind them is not looked at
                self._mask.fill(0)
                self._is_whole = False
                return
        self._matcher.consume(self._tokens[self._consumed : position].tolist())
        self._consumed = position
        self._is_whole = self._matcher.fill(self._mask)

    def _prepare(self) -> None:
        if self._is_whole:
            self._mask |= self._ends
        self._has_ids = False
        if self._on_host:
            self._find_ids()

    def _find_ids(self) -> None:
        if not self._has_ids:
            self._ids, self._are_allowed = self._seen.ids_of(self._mask)
            self._has_ids = True

    def fail(self, position: int, why: str) -> None:
        """Nothing may be sampled any more."""
        self._failure = why
        logger.warning("a request's grammar failed at position %d: %s", position, why)

    def mask(self, position: int) -> Words:
        """[⌈vocabulary / 32⌉]: what may be sampled there; valid until the next one is made."""
        self.make(position)
        return np.zeros_like(self._mask) if self._failure else self._mask

    def apply(self, position: int, logits: Logits) -> None:
        self.make(position)
        if self._failure:
            logits.fill(-math.inf)
            return
        self._find_ids()
        if not self._are_allowed:
            logits[self._ids] = -math.inf
            return
        kept = logits[self._ids]
        logits.fill(-math.inf)
        logits[self._ids] = kept

    def on_device(self, change: DeviceChange) -> None:
        change.mask, change.verdict = self.mask, lambda: self.verdict

    @property
    def verdict(self) -> int:
        """Why no token is left at the mask's position, if that is the grammar's doing."""
        if self._failure:
            return GRAMMAR_FAILED
        can_end = self._is_whole and self._position >= self._first_end
        return GRAMMAR_ENDED if can_end and not self._mask.any() else ALL_MASKED


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
        """Until those that were begun are made. The row that keeps the others waiting for too long fails; what is
        behind it is made by whoever asks."""
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
    def __init__(self, rows: list[tuple[GrammarRow, int]], seconds: deque[float]) -> None:
        """`seconds`: where it is told how long each mask took."""
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
            logger.exception("the masks of a step were not made")  # whoever asks for them meets it again
        finally:
            self.is_done.set()

    def abandon(self) -> tuple[GrammarRow, int] | None:
        """No further row is begun; the one that is being made."""
        with self._lock:
            self._is_abandoned = True
            return self._current
