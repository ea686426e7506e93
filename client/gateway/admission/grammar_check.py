"""Grammars checked before a request is let in: compiled in child processes with a time and a memory limit, and kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import signal
import sys
from collections import OrderedDict
from collections.abc import Awaitable
from typing import TypeVar

from allspan.client.gateway.config import LimitsConfig
from allspan.protos.api.errors import InternalError, InvalidRequest, QueueFull
from allspan.protos.api.grammar import Grammar
from allspan.protos.text import Tokenizer

CHILDREN = 2
"""Number of child processes that compile, so that one very slow grammar does not block the others."""
MOST_WAITING = 256
MOST_KEPT = 4096
"""Answers kept, by digest: some 1 kB each at most."""
START_S = 30.0
"""Seconds within which a child must be ready."""
STARTS = 3
"""Number of attempts to start a child."""
WALL_TIME_FACTOR = 4
"""Wall-clock limit of a check as a multiple of its limit of processor time: a child that gets less than a quarter of a
processor fails."""
_WAY_OUT = "make it simpler"

logger = logging.getLogger("allspan.gateway")

T = TypeVar("T")


class GrammarCheck:
    """`check` on the gateway's loop; `close` in the end. Children are started when first needed, or by
    `warm_up`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: LimitsConfig) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._checking: dict[bytes, asyncio.Task[str]] = {}
        self._idle: list[_Child] = []
        self._turns = asyncio.Semaphore(CHILDREN)

    async def check(self, grammar: Grammar, field: str) -> None:
        """InvalidRequest (about `field`) when no rank could apply it; QueueFull."""
        most = self._limits.max_grammar_bytes
        if (size := len(grammar.text.encode())) > most:
            raise InvalidRequest(f"{field}: the {grammar.kind} has {size} bytes, at most {most}", field)
        key = hashlib.sha256(f"{grammar.kind}\n{grammar.text}".encode()).digest()
        problem = self._kept.get(key)
        if problem is None:
            problem = await self._shared(key, grammar)
        else:
            self._kept.move_to_end(key)
        if problem:
            raise InvalidRequest(f"{field}: {problem}", field)

    async def warm_up(self) -> None:
        """Starts a child, for which the first grammar then does not wait. A failure is left to that grammar."""
        try:
            async with self._turns:
                if not self._idle:
                    self._idle.append(await self._start())
        except (InternalError, OSError) as error:
            logger.warning("no process that compiles grammars was started ahead: %s", error)

    async def close(self) -> None:
        """Ends the children."""
        for task in self._checking.values():
            task.cancel()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)
        children, self._idle = self._idle, []
        await asyncio.gather(*(child.end() for child in children))

    async def _shared(self, key: bytes, grammar: Grammar) -> str:
        """Runs one check for all requests with the same grammar meanwhile; it continues when their callers leave."""
        task = self._checking.get(key)
        if task is None:
            if len(self._checking) >= MOST_WAITING:
                raise QueueFull(f"{MOST_WAITING} grammars are waiting to be compiled, the limit; try again later")
            task = self._checking[key] = asyncio.create_task(self._problem(key, grammar))
            task.add_done_callback(lambda _: self._checking.pop(key, None))
        return await asyncio.shield(task)

    async def _problem(self, key: bytes, grammar: Grammar) -> str:
        limit = self._limits
        async with self._turns:
            try:
                try:
                    problem = await self._answer(grammar, self._idle.pop() if self._idle else await self._start())
                except EOFError:  # something else may have ended the child, so a new one tries again
                    problem = await self._answer(grammar, await self._start())
            except TimeoutError:
                logger.info("a %s of %d characters took too long", grammar.kind, len(grammar.text))
                within = f"within {limit.grammar_timeout:g} s (--grammar-timeout)"
                return f"the {grammar.kind} was not compiled {within}; {_WAY_OUT}"
            except EOFError as error:
                logger.info("a %s of %d characters was too much: %r", grammar.kind, len(grammar.text), error)
                problem = (
                    f"the {grammar.kind} takes more than {limit.grammar_memory_bytes} bytes "
                    f"(--grammar-memory-bytes) or nests too deeply; {_WAY_OUT}"
                )
        self._kept[key] = problem
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return problem

    async def _answer(self, grammar: Grammar, child: _Child) -> str:
        """Returns what a child says of the grammar. Raises TimeoutError when its time ran out, EOFError when the child
        ended for another reason."""
        try:
            problem = await _within(WALL_TIME_FACTOR * self._limits.grammar_timeout, child.ask(grammar))
            self._idle.append(child)
            return problem
        except EOFError:
            if await child.end() == -signal.SIGPROF:
                raise TimeoutError from None
            raise
        finally:
            if child not in self._idle:
                await child.end()

    async def _start(self) -> _Child:
        """Starts a child, again when one ends before it is ready. Raises InternalError after `STARTS` of them."""
        special = {i: piece.decode("utf-8", "replace") for i, piece in self._special()}
        for start in range(1, STARTS + 1):
            child = await _Child.start(self._limits)
            try:
                await _within(START_S, child.greet(self._vocab_size, special))
                return child
            except TimeoutError as error:
                await child.end()
                raise InternalError(f"the process that compiles grammars is not ready after {START_S:g} s") from error
            except EOFError:
                code = await child.end()
                logger.warning("start %d of the process that compiles grammars ended with code %d", start, code)
            except BaseException:
                await child.end()
                raise
        raise InternalError(f"the process that compiles grammars ended at {STARTS} starts; the log has the exit codes")

    def _special(self) -> list[tuple[int, bytes]]:
        ids = {*self._tokenizer.special_ids, *self._tokenizer.eos_token_ids}
        pieces = [(token_id, self._tokenizer.codec.piece(token_id)) for token_id in sorted(ids)]
        return [(token_id, piece) for token_id, piece in pieces if piece and token_id < self._vocab_size]


class _Child:
    """One process of `grammar_child`. EOFError when it died."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_dead = False

    @classmethod
    async def start(cls, limits: LimitsConfig) -> _Child:
        each = (str(limits.grammar_timeout), str(limits.grammar_memory_bytes))
        words = (sys.executable, "-m", "allspan.client.gateway.admission.grammar_child", *each)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        return cls(process)

    async def greet(self, vocab_size: int, special: dict[int, str]) -> None:
        await self._ask({"vocab_size": vocab_size, "special": special})

    async def ask(self, grammar: Grammar) -> str:
        answer = await self._ask({"kind": grammar.kind, "text": grammar.text})
        return str(answer["problem"])

    async def end(self) -> int:
        """Ends the process at once, unless it has ended by itself; returns its exit code."""
        if self._is_dead and self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await _within(1.0, self._process.wait())
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    async def _ask(self, message: object) -> dict[str, object]:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        try:
            to.write(json.dumps(message).encode() + b"\n")
            await to.drain()
        except (BrokenPipeError, ConnectionResetError, RuntimeError):  # uvloop raises it for a closed transport
            self._is_dead = True
            raise EOFError("the process ended") from None
        line = await back.readline()
        if not line.endswith(b"\n"):
            self._is_dead = True
            raise EOFError("the process ended")
        answer: dict[str, object] = json.loads(line)
        return answer


async def _within(seconds: float, waiting: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await waiting
