"""ForcedTokens: proposes tokens that a request's grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.sampling.grammar import Matcher, MatcherFailed
from allspan.worker.scheduler.drafting.drafter import Draft
from allspan.worker.scheduler.request import Request


class ForcedTokens:
    """Has a matcher of its own for each running request with a grammar. Texts that are forced can be told in other
    tokens than the tokenizer's, so that they are drafts like any others."""

    def __init__(self) -> None:
        self._matchers: dict[bytes, _Reader] = {}

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        if request.grammar is None or before:
            return ()
        reader = self._matchers.get(request.request_id)
        if reader is None:
            reader = self._matchers[request.request_id] = _Reader(request.grammar.matcher())
        return [Draft(token) for token in reader.forced(request.output_token_ids)[:most]]

    def accepted(self, request: Request, drafts: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the request's grammar lets through."""
        reader = self._matchers.get(request.request_id)
        return reader.accepted(request.output_token_ids, drafts) if reader else len(drafts)

    def chance(self, kind: int) -> float:
        return 0.9

    def forget(self, request: Request) -> None:
        self._matchers.pop(request.request_id, None)


class _Reader:
    """A matcher that has read an output so far. One that fails proposes nothing any more: the request's own will say
    what is wrong."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher: Matcher | None = matcher
        self._count = 0

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        matcher = self._read(output)
        return matcher.forced() if matcher else ()

    def accepted(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        matcher = self._read(output)
        return matcher.accepts(list(drafts)) if matcher else 0

    def _read(self, output: Sequence[int]) -> Matcher | None:
        if self._matcher and len(output) > self._count:
            try:
                self._matcher.consume(list(output[self._count :]))
            except MatcherFailed:
                self._matcher = None
            self._count = len(output)
        return self._matcher
