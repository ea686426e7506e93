"""Child processes that compile grammars: their deaths are not blamed on the grammar."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest

from allspan.client.gateway.admission.grammar_check import GrammarCheck
from allspan.client.gateway.config import LimitsConfig
from allspan.protos.api.errors import InternalError, InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.text.helper_process import ATTEMPTS, HelperProcess
from support.chat_tokenizer import VOCAB_SIZE, chat_tokenizer


async def test_children_that_were_killed_while_idle_are_replaced() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        for number in range(3):
            await check.check(Grammar("regex", f"a{{{number + 1}}}"), "guided_regex")
            for child in check._children._idle:
                os.kill(child.pid, signal.SIGKILL)
    finally:
        await check.close()


async def test_the_first_grammar_is_compiled_by_the_child_that_was_started_ahead() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        await check.warm_up()
        ahead = list(check._children._idle)
        await check.check(Grammar("regex", "a"), "guided_regex")
        assert check._children._idle == ahead
        assert len(ahead) == 1
    finally:
        await check.close()


@pytest.mark.parametrize("failures", [1, ATTEMPTS])
async def test_a_child_that_does_not_start_is_started_again_a_few_times(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def exchange(child: HelperProcess, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        if "special" in question:
            started.append(child.pid)
            if len(started) <= failures:
                child.kill()
        return original(child, question, within_s)

    original = HelperProcess._exchange
    monkeypatch.setattr(HelperProcess, "_exchange", exchange)
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        if failures < ATTEMPTS:
            await check.check(Grammar("regex", "a"), "guided_regex")
            assert len(started) == failures + 1
        else:
            with pytest.raises(InternalError, match=f"at {ATTEMPTS} starts"):
                await check.check(Grammar("regex", "a"), "guided_regex")
            assert len(started) == ATTEMPTS
    finally:
        await check.close()


async def test_a_grammar_that_takes_too_long_is_refused_with_its_limit() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig(grammar_timeout=0.1, max_grammar_bytes=262144))
    try:
        with pytest.raises(InvalidRequest, match=r"was not compiled within 0\.1 s \(--grammar-timeout\)"):
            await check.check(Grammar("regex", "a?" * 120_000), "guided_regex")
    finally:
        await check.close()


async def test_closing_ends_a_check_that_is_running() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig(grammar_timeout=20.0, max_grammar_bytes=262144))
    slow = Grammar("json_schema", '{"enum": [' + ", ".join(f'"v{i}"' for i in range(12_000)) + "]}")
    task = asyncio.create_task(check.check(slow, "f"))
    async with asyncio.timeout(20.0):
        while not check._children._all:
            await asyncio.sleep(0.01)
    begin = time.monotonic()
    await check.close()
    assert time.monotonic() - begin < 5.0
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(5.0):
        while check._children._all:
            await asyncio.sleep(0.01)
