"""Child processes that compile grammars: their deaths are not blamed on the grammar."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from allspan.client.gateway.admission import grammar_check
from allspan.client.gateway.admission.grammar_check import GrammarCheck
from allspan.client.gateway.config import LimitsConfig
from allspan.protos.api.errors import InternalError
from allspan.protos.api.grammar import Grammar
from support.chat_tokenizer import VOCAB_SIZE, chat_tokenizer


async def test_children_that_were_killed_while_idle_are_replaced() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        for number in range(3):
            await check.check(Grammar("regex", f"a{{{number + 1}}}"), "guided_regex")
            for child in check._idle:
                os.kill(child._process.pid, signal.SIGKILL)
    finally:
        await check.close()


async def test_the_first_grammar_is_compiled_by_the_child_that_was_started_ahead() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        await check.warm_up()
        ahead = list(check._idle)
        await check.check(Grammar("regex", "a"), "guided_regex")
        assert check._idle == ahead
        assert len(ahead) == 1
    finally:
        await check.close()


class Failing:
    """Children of which the first ones end before they are ready."""

    def __init__(self, failures: int) -> None:
        self.left, self.started, self.greet = failures, 0, grammar_check._Child.greet

    async def __call__(self, child: Any, vocab_size: int, special: dict[int, str]) -> None:
        self.started += 1
        if self.left:
            self.left -= 1
            child._process.kill()
            await child._process.wait()
        await self.greet(child, vocab_size, special)


@pytest.mark.parametrize("failures", [1, grammar_check.STARTS])
async def test_a_child_that_does_not_start_is_started_again_a_few_times(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(failures)

    async def greet(child: Any, vocab_size: int, special: dict[int, str]) -> None:
        await failing(child, vocab_size, special)

    monkeypatch.setattr(grammar_check._Child, "greet", greet)
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        if failures < grammar_check.STARTS:
            await check.check(Grammar("regex", "a"), "guided_regex")
            assert failing.started == failures + 1
        else:
            with pytest.raises(InternalError, match=f"ended at {grammar_check.STARTS} starts"):
                await check.check(Grammar("regex", "a"), "guided_regex")
            assert failing.started == grammar_check.STARTS
    finally:
        await check.close()
