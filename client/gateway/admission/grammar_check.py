"""Grammars checked before a request is let in: compiled in child processes with a time and a memory limit, and kept."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from allspan.client.gateway.config import LimitsConfig
from allspan.protos.api.errors import InvalidRequest, QueueFull
from allspan.protos.api.grammar import Grammar
from allspan.protos.text import Tokenizer
from allspan.protos.text.helper_process import HelperEnded, HelperPool

CHILDREN = 2
"""Number of child processes that compile, so that one very slow grammar does not block the others."""
MOST_WAITING = 256
MOST_KEPT = 4096
"""Answers kept, by digest: some 1 kB each at most."""
WALL_TIME_FACTOR = 4
"""Wall-clock limit of a check as a multiple of its limit of processor time: a child that gets less than a quarter of a
processor fails."""
_WAY_OUT = "make it simpler"

logger = logging.getLogger("allspan.gateway")


class GrammarCheck:
    """`check` on the gateway's loop; `close` in the end. Children are started when first needed, or by
    `warm_up`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: LimitsConfig) -> None:
        self._limits = limits
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._checking: dict[bytes, asyncio.Task[str]] = {}
        words = (str(limits.grammar_timeout), str(limits.grammar_memory_bytes))
        model = {"vocab_size": vocab_size, "special": _special(tokenizer, vocab_size)}
        self._children = HelperPool("allspan.client.gateway.admission.grammar_child", words, CHILDREN, model)
        self._threads = ThreadPoolExecutor(CHILDREN, "grammars")

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
            await asyncio.get_running_loop().run_in_executor(self._threads, self._children.prepare)
        except (HelperEnded, OSError) as error:
            logger.warning("no process that compiles grammars was started ahead: %s", error)

    async def close(self) -> None:
        """Ends the children."""
        for task in self._checking.values():
            task.cancel()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)
        await asyncio.to_thread(self._children.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

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
        question = {"kind": grammar.kind, "text": grammar.text}
        loop, within_s = asyncio.get_running_loop(), WALL_TIME_FACTOR * limit.grammar_timeout
        try:
            answer = await loop.run_in_executor(self._threads, self._children.ask, question, within_s)
            problem = str(answer["problem"])
        except TimeoutError:
            logger.info("a %s of %d characters took too long", grammar.kind, len(grammar.text))
            within = f"within {limit.grammar_timeout:g} s (--grammar-timeout)"
            return f"the {grammar.kind} was not compiled {within}; {_WAY_OUT}"
        except HelperEnded as error:
            logger.info("a %s of %d characters was too much: %r", grammar.kind, len(grammar.text), error)
            problem = (
                f"the {grammar.kind} takes more than {limit.grammar_memory_bytes} bytes "
                f"(--grammar-memory-bytes) or nests too deeply; {_WAY_OUT}"
            )
        self._kept[key] = problem
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return problem


def _special(tokenizer: Tokenizer, vocab_size: int) -> dict[int, str]:
    """The texts of the special tokens, by their ids."""
    ids = {*tokenizer.special_ids, *tokenizer.eos_token_ids}
    pieces = {token_id: tokenizer.codec.piece(token_id) for token_id in sorted(ids) if token_id < vocab_size}
    return {token_id: piece.decode("utf-8", "replace") for token_id, piece in pieces.items() if piece}
