"""SuffixDrafter: proposes what followed when the last tokens occurred before, in the request itself or in an earlier
answer (suffix decoding: Oliaro et al., 2024, arXiv:2411.04975)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from allspan.protos.config.speculation import Speculation
from allspan.worker.scheduler.drafting.drafter import LONGEST_CONTEXT, Draft, context
from allspan.worker.scheduler.drafting.token_index import Found, TokenIndex
from allspan.worker.scheduler.request import Request

MOST_SHARED_TOKENS = 1 << 20
"""Tokens of earlier answers that are kept for all salts together: 24 MB at most."""
SALT_TOKENS = 512
"""A salt takes memory as for so many tokens more."""
MOST_SALT_TOKENS = 1 << 17
"""The most of them that one salt has; the newest half at least is kept when there are more."""
_BEFORE_ANSWER = 8
"""Tokens of the prompt that are kept before an answer: how the answer begins is then found, too."""

_LENGTHS = (2, 3, 4, 6, 9, 14, 22)
_CHANCES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93)
_AGREEMENTS = (0.0, 0.05, -0.2)
_WAYS, _LATER = 4, 3
"""The kinds of a length: by what `TokenIndex.Found.agreement` says, and drafts that follow another one."""


_BUCKETS = tuple(bisect_left(_LENGTHS, length) for length in range(2 * LONGEST_CONTEXT))
"""The bucket of each length."""


def _kinds(found: Found, count: int, is_shared: bool) -> list[int]:
    """The kinds of so many drafts of a place."""
    first = (_BUCKETS[found.length] * _WAYS + found.agreement) * 2 + is_shared
    later = _LATER * 2 + is_shared
    buckets = _BUCKETS[found.length + 1 : found.length + count]
    return [first, *(bucket * (2 * _WAYS) + later for bucket in buckets)]


class _Answers:
    """The earlier answers of one salt: those of the last generation, and of the one before."""

    def __init__(self) -> None:
        self.now, self.before = TokenIndex(), TokenIndex()
        self.num_now = 0

    @property
    def weight(self) -> int:
        """Its share of MOST_SHARED_TOKENS."""
        return SALT_TOKENS + len(self.now) + len(self.before)

    def add(self, tokens: Sequence[int], most_answers: int) -> None:
        if self.num_now and (len(self.now) + len(tokens) > MOST_SALT_TOKENS // 2 or 2 * self.num_now >= most_answers):
            self.now, self.before, self.num_now = TokenIndex(), self.now, 0
        self.now.extend(tokens[-MOST_SALT_TOKENS // 2 :])
        self.num_now += 1


class SuffixDrafter:
    """Has an index of each running request's tokens, 12 to 24 bytes a token, and one of earlier answers for each salt
    of the prefix cache and adapter. Requests that stay out of the prefix cache stay out of these, too."""

    def __init__(self, asked: Speculation) -> None:
        self._longest = asked.suffix_decoding_max_tree_depth
        self._factor = asked.suffix_decoding_max_spec_factor
        self._most_answers = asked.suffix_decoding_max_cached_requests
        self._own: dict[bytes, TokenIndex] = {}
        self._answers: OrderedDict[tuple[str, int], _Answers] = OrderedDict()
        self._num_shared = 0

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of earlier answers, and what their salts take beside them."""
        return self._num_shared

    def propose(self, request: Request, before: Sequence[int], most: int) -> Sequence[Draft]:
        own = self._own.get(request.request_id)
        if own is None:
            own = self._own[request.request_id] = TokenIndex()
        if len(own) < request.num_tokens:
            own.extend(request.tokens(len(own), request.num_tokens))
        last = context(request, before)
        index, found, is_shared = own, own.find(last, self._longest), False
        answers = self._answers.get(_key(request)) if self._shares(request) else None
        for other in (answers.now, answers.before) if answers else ():
            length = found.length if found else 0
            if length < self._longest and (more := other.find(last, self._longest)) and more.length > length:
                index, found, is_shared = other, more, True
        if found is None:
            return ()
        count = min(most, math.ceil(found.length * self._factor))
        tokens = index.tokens[found.place : found.place + count].tolist()
        return list(map(Draft, tokens, _kinds(found, len(tokens), is_shared)))

    def chance(self, kind: int) -> float:
        bucket, way = divmod(kind // 2, _WAYS)
        return _CHANCES[bucket] + (_AGREEMENTS[way] if way < _LATER else 0.03)

    def forget(self, request: Request) -> None:
        self._own.pop(request.request_id, None)
        if not (request.output_token_ids and self._shares(request)):
            return
        key, prompt_len = _key(request), len(request.prompt_token_ids)
        tokens = request.tokens(max(0, prompt_len - _BEFORE_ANSWER), request.num_tokens)
        if (answers := self._answers.get(key)) is None:
            answers = self._answers[key] = _Answers()
        else:
            self._num_shared -= answers.weight
        self._answers.move_to_end(key)
        answers.add(tokens, self._most_answers)
        self._num_shared += answers.weight
        while self._num_shared > MOST_SHARED_TOKENS:
            self._num_shared -= self._answers.popitem(last=False)[1].weight

    def _shares(self, request: Request) -> bool:
        return self._most_answers > 0 and request.options.prefix_cache


def _key(request: Request) -> tuple[str, int]:
    return request.options.cache_salt, request.adapter
