"""A row whose output must stay in a grammar: before each draw, a mask of the tokens that may come next.

The library that knows grammars stands behind `CompiledGrammar` and `Matcher`. A matcher reads the row's tokens up to
the position that is sampled, however many those are, so a rank that samples its share of the steps only, a request that
was preempted and one that another world began all come out alike. Ends are ours: where the text is whole, and only
there, the model's end-of-sequence ids and the request's own stop ids may be sampled. Where nothing but the end may
come, and no id may be sampled that says so (`ignore_eos`, or a model without one), the row gets GRAMMAR_ENDED.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.abi.sampling import ALL_MASKED
from allspan.worker.sampling.failure import GRAMMAR_ENDED, GRAMMAR_FAILED
from allspan.worker.sampling.processor import DeviceChange, Logits

Words = NDArray[np.int32]
MaskIds = tuple[NDArray[np.int64], bool]
"""Token ids, and True where these may be sampled, False where all others may."""

FIRST_ALLOWANCE_S, TOKEN_ALLOWANCE_S = 1.0, 0.005
"""The seconds of a processor that a row's masks may take in all, and for each of its tokens; see `Allowance`."""
_BITS = np.arange(32)
_MOST_MASKS, _MOST_IDS = 256, 16_384
"""The masks whose ids are kept, and the most ids of one that is."""

logger = logging.getLogger(__name__)


class MatcherFailed(Exception):
    """A matcher cannot go on: its grammar exceeds a limit, or a token was not of its language."""


class Matcher(Protocol):
    """How far one output has come in its grammar. Used by one thread at a time."""

    def consume(self, token_ids: list[int]) -> None:
        """The output's next tokens. Raises MatcherFailed."""

    def accepts(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first on, may come next. Consumes none."""

    def forced(self) -> list[int]:
        """Tokens of the text that must come next, as the tokenizer spells it; often none. What follows the text may be
        one token with the last of them."""

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
        self._kept: dict[bytes, MaskIds] = {}

    def ids_of(self, mask: Words) -> MaskIds:
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

    def _find(self, mask: Words) -> MaskIds:
        mixed = np.flatnonzero(mask)
        if 4 * len(mixed) <= len(mask):  # most words are 0, and need no look
            few = np.unpackbits(mask[mixed].view(np.uint8), bitorder="little").view(np.bool_).reshape(-1, 32)
            return (32 * mixed[:, None] + _BITS)[few], True
        banned = np.unpackbits((~mask).view(np.uint8), count=self.vocab_size, bitorder="little")
        return np.flatnonzero(banned), False


class OutputMatcher:
    """How far one row's tokens have been read by its grammar's matcher. A matcher that fails and shares what it has
    learnt with others is replaced, once, by one of its own."""

    def __init__(self, grammar: CompiledGrammar, tokens: Words, prompt_len: int) -> None:
        """`tokens`: those of the row, prompt and output, kept up to date by its owner."""
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._is_own = False
        """The matcher shares nothing."""
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._consumed = prompt_len
        self._first_draft = len(tokens)
        """From this position on, tokens are drafts."""

    def fill(self, position: int, mask: Words) -> bool:
        """Writes which tokens may come at `position`; see `Matcher.fill`. Raises MatcherFailed."""
        try:
            return self._fill(position, mask)
        except MatcherFailed:
            if self._is_own:
                raise
        self._matcher, self._is_own = self._grammar.own_matcher(), True
        self._consumed = self._prompt_len
        return self._fill(position, mask)

    def begin_drafts(self, position: int) -> None:
        """Tokens from `position` on are drafts, which need not be of the grammar's language."""
        self._first_draft = position

    def retract(self, position: int) -> None:
        """The tokens before `position` hold, those from there on were taken back, and none is a draft any more."""
        self._first_draft = len(self._tokens)
        if self._consumed <= position:
            return
        try:
            self._matcher.rollback(self._consumed - position)
            self._consumed = position
        except MatcherFailed:
            self._matcher, self._consumed = self._grammar.matcher(), self._prompt_len

    def restart(self) -> None:
        """The matcher failed behind drafts that were taken back: another one reads the tokens from the first on."""
        self._matcher, self._is_own = self._grammar.matcher(), False
        self._consumed, self._first_draft = self._prompt_len, len(self._tokens)

    def _fill(self, position: int, mask: Words) -> bool:
        drafts = self._tokens[max(self._consumed, self._first_draft) : position].tolist()
        if drafts:
            certain = self._tokens[self._consumed : position - len(drafts)].tolist()
            self._matcher.consume(certain)
            self._consumed += len(certain)
            if self._matcher.accepts(drafts) < len(drafts):  # what is sampled behind them is not looked at
                mask.fill(0)
                return False
        self._matcher.consume(self._tokens[self._consumed : position].tolist())
        self._consumed = position
        return self._matcher.fill(mask)


class Allowance:
    """The time of a processor that a row's masks may take: a hundred times what common grammars take. A grammar that
    needs more would delay the steps of all requests."""

    def __init__(self) -> None:
        self._spent_s = 0.0

    def spend(self, seconds: float, num_output: int) -> str:
        """Adds the time of the mask after `num_output` tokens. Returns why it was too much, or ""."""
        self._spent_s += seconds
        allowed_s = FIRST_ALLOWANCE_S + TOKEN_ALLOWANCE_S * num_output
        if self._spent_s <= allowed_s:
            return ""
        return f"its masks took {self._spent_s:.2f} s of a processor, {allowed_s:.2f} s are allowed"


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
        """`tokens`: those of the row, prompt and output, kept up to date by its owner. `ends`: what may be sampled
        where the text is whole. `seen`: the known masks of this vocabulary, shared by the rows. `first_end`: the first
        position where the request may end. `on_host`: logits are changed here, by ids that are found with the mask; a
        device takes its bits."""
        self._matcher = OutputMatcher(grammar, tokens, prompt_len)
        self._allowance = Allowance()
        self._prompt_len = prompt_len
        self._ends = mask_of(ends, seen.vocab_size)
        self._seen = seen
        self._first_end = first_end
        self._on_host = on_host
        self._mask = np.zeros_like(self._ends)
        self._ids: MaskIds | None = None
        """The ids of the mask, once they have been looked up."""
        self._position = -1
        """The position that the mask is for."""
        self._is_whole = False
        """The text before that position is whole."""
        self._failure = ""
        self._failed_at = -1
        """The position whose mask could not be made."""

    def make(self, position: int) -> None:
        """Makes the mask for `position`. Idempotent."""
        if self._failure or self._position == position:
            return
        started = time.thread_time()
        try:
            is_whole = self._matcher.fill(position, self._mask)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also what a library's panic is raised as: it is this row's trouble alone
            why = str(error) if isinstance(error, MatcherFailed) else f"{type(error).__name__}: {error}"
            self._failed_at = position
            self.fail(position, self._spend(started, position) or why)
            return
        if self._failure:  # it came too late
            return
        if is_whole:
            self._mask |= self._ends
        self._ids = self._seen.ids_of(self._mask) if self._on_host else None
        self._is_whole, self._position = is_whole, position
        if too_much := self._spend(started, position):
            self.fail(position, too_much)

    def _spend(self, started: float, position: int) -> str:
        return self._allowance.spend(time.thread_time() - started, position - self._prompt_len)

    def begin_drafts(self, position: int) -> None:
        """Tokens from `position` on are drafts, which need not be of the grammar's language."""
        self._matcher.begin_drafts(position)

    def retract(self, position: int) -> None:
        """The tokens before `position` hold, those from there on were taken back, and none is a draft any more."""
        self._position = -1
        if self._failed_at > position:  # behind a draft that was not kept
            self._failure, self._failed_at = "", -1
            self._matcher.restart()
        elif not self._failure:
            self._matcher.retract(position)

    def fail(self, position: int, why: str) -> None:
        """Nothing may be sampled any more."""
        self._failure = why
        logger.warning("a request's grammar failed at position %d: %s", position, why)

    def mask(self, position: int) -> Words:
        """Returns [⌈vocabulary / 32⌉]: what may be sampled there; valid until the next one is made."""
        self.make(position)
        return np.zeros_like(self._mask) if self._failure else self._mask

    def apply(self, position: int, logits: Logits) -> None:
        self.make(position)
        if self._failure:
            logits.fill(-math.inf)
            return
        if self._ids is None:
            self._ids = self._seen.ids_of(self._mask)
        ids, are_allowed = self._ids
        if not are_allowed:
            logits[ids] = -math.inf
            return
        kept = logits[ids]
        logits.fill(-math.inf)
        logits[ids] = kept

    def on_device(self, change: DeviceChange) -> None:
        change.mask, change.verdict = self.mask, lambda: self.verdict

    @property
    def verdict(self) -> int:
        """Why no token is left at the mask's position, if that is the grammar's doing."""
        if self._failure:
            return GRAMMAR_FAILED
        can_end = self._is_whole and self._position >= self._first_end
        return GRAMMAR_ENDED if can_end and not self._mask.any() else ALL_MASKED
