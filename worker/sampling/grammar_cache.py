"""Grammars: compiled on threads of their own, within limits of time and number, and kept for later requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING

from allspan.protos.api.errors import AllspanError, InternalError, InvalidRequest, QueueFull
from allspan.protos.api.grammar import Grammar
from allspan.worker.process.host import run_on
from allspan.worker.process.thread_priority import lower_priority
from allspan.worker.sampling.grammar import CompiledGrammar

if TYPE_CHECKING:
    from allspan.protos.text.tokenizers.tokenizer import Tokenizer
    from allspan.worker.sampling.guidance import GuidanceCompiler

COMPILE_S = 30.0
"""The seconds that a grammar is waited for."""
MOST_KEPT = 64
MOST_PENDING = 256
THREADS = 4
_NICENESS = 10
"""Grammars are compiled at this niceness above the process's own: one that takes long must not delay steps."""


class Grammars:
    """The compiled grammars of a model; safe from any thread. Nothing is loaded, and no thread runs, before the first
    grammar: the library keeps Python's lock while it makes a tokenizer's table, and steps would wait for it."""

    def __init__(self, path: str, vocab_size: int, cpus: Sequence[int] = ()) -> None:
        """`path` of the model, for its tokenizer; `vocab_size`: the model's. `cpus`: where the threads may run; empty:
        anywhere that the process may."""
        self.load_tokenizer: Callable[[], Tokenizer] = partial(_load_tokenizer, path)
        """Raises what says that there is none."""
        self._vocab_size = vocab_size
        self._cpus = tuple(cpus)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._compiler: GuidanceCompiler | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._num_pending = 0

    def begin(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Returns the future of a grammar that is being compiled, the same for equal ones. Raises QueueFull. Its result
        may be InvalidRequest; it is not to be cancelled."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return known
            if self._num_pending >= MOST_PENDING:
                raise QueueFull(f"{self._num_pending} grammars are being compiled, the limit; try again later")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(THREADS, "grammars", _step_back, (self._cpus,))
            self._num_pending += 1
            future = self._kept[grammar] = self._executor.submit(self._compile, grammar)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return future

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Waits for it. Raises InvalidRequest, also when it takes longer than COMPILE_S, or QueueFull."""
        try:
            return self.begin(grammar).result(COMPILE_S)
        except FutureTimeoutError:
            raise took_too_long() from None

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return self._open().compile(grammar)
        except AllspanError:
            raise
        except BaseException as error:  # also what a library's panic is raised as
            raise InternalError(f"the grammar was not compiled: {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._num_pending -= 1

    def _open(self) -> GuidanceCompiler:
        with self._loading:
            if self._compiler is None:
                try:
                    tokenizer = self.load_tokenizer()
                except AllspanError as error:
                    raise InvalidRequest(f"grammar needs the model's tokenizer: {error.message}", "grammar") from error
                self._compiler = _compiler(tokenizer, self._vocab_size)
            return self._compiler


def _load_tokenizer(path: str) -> Tokenizer:
    from allspan.protos.text.tokenizers.loading import load_tokenizer  # most ranks never need it

    return load_tokenizer(path)


def _compiler(tokenizer: Tokenizer, vocab_size: int) -> GuidanceCompiler:
    try:
        from allspan.worker.sampling.guidance import GuidanceCompiler
    except ImportError as error:
        raise InvalidRequest(
            f"grammar needs the library llguidance, which cannot be loaded: {error}", "grammar"
        ) from error
    return GuidanceCompiler(tokenizer, vocab_size)


def took_too_long() -> InvalidRequest:
    return InvalidRequest(f"grammar was not compiled within {COMPILE_S:g} s; make it simpler", "grammar")


def _step_back(cpus: tuple[int, ...]) -> None:
    run_on(cpus)
    lower_priority(_NICENESS)
