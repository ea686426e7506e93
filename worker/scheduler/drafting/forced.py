"""ForcedTokens: proposes tokens that a request's grammar leaves no choice about."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from allspan.worker.sampling.grammar import Matcher
from allspan.worker.scheduler.drafting.drafter import Draft
from allspan.worker.scheduler.request import Request

T = TypeVar("T")

FIRST_ALLOWANCE_S, TOKEN_ALLOWANCE_S = 0.02, 0.0005
"""The seconds that a request's grammar may take here in all, and for each of its tokens; common ones take a tenth."""
_WITHIN, _LAST, _ALONE = range(3)
"""The kinds of drafts: others of the text follow; it is the last one, which may be one token with what follows; and it
is also the first one."""
_CHANCES = (0.9, 0.7, 0.5)


class ForcedTokens:
    """Has a matcher of its own for each running request with a grammar. Texts that are forced can be told in other
    tokens than the tokenizer's, so that they are drafts like any others."""

    def __init__(self) -> None:
        self._readers: dict[bytes, _Reader] = {}

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        if request.grammar is None:
            return ()
        reader = self._readers.get(request.request_id)
        if reader is None:
            reader = self._readers[request.request_id] = _Reader(request.grammar.matcher())
        nothing: list[int] = []
        forced = reader.ask(request.output_token_ids, lambda read: _forced_behind(read, list(before)), nothing)
        kinds = *[_WITHIN] * (len(forced) - 1), _LAST if len(forced) > 1 else _ALONE
        return list(map(Draft, forced, kinds))

    def accepted(self, request: Request, drafts: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the request's grammar lets through; none where it takes too long
        to say."""
        reader, asked = self._readers.get(request.request_id), list(drafts)
        if reader is None:
            return len(asked)
        return reader.ask(request.output_token_ids, lambda read: read.accepts(asked), 0)

    def chance(self, kind: int) -> float:
        return _CHANCES[kind]

    def forget(self, request: Request) -> None:
        self._readers.pop(request.request_id, None)


def _forced_behind(matcher: Matcher, drafts: list[int]) -> list[int]:
    """What the grammar forces behind drafts that it lets through."""
    if not drafts:
        return matcher.forced()
    matcher.consume(drafts)
    forced = matcher.forced()
    matcher.rollback(len(drafts))
    return forced


class _Reader:
    """A matcher that has read an output so far. One that fails, or takes too long, is asked no more: the request's own
    says what is wrong with it."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher: Matcher | None = matcher
        self._count = 0
        self._spent_s = 0.0

    def ask(self, output: Sequence[int], question: Callable[[Matcher], T], otherwise: T) -> T:
        """The matcher's answer behind this output."""
        if self._matcher is None:
            return otherwise
        started = time.thread_time()
        try:
            if len(output) > self._count:
                self._matcher.consume(list(output[self._count :]))
                self._count = len(output)
            answer = question(self._matcher)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # also what a library's panic is raised as
            self._matcher = None
            return otherwise
        self._spent_s += time.thread_time() - started
        if self._spent_s > FIRST_ALLOWANCE_S + TOKEN_ALLOWANCE_S * len(output):
            self._matcher = None
        return answer
