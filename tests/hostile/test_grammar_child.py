"""Processes that compile grammars and end, whoever ended them: no caller hears of it, and no grammar is blamed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from allspan.client.gateway.admission.grammar_check import GrammarCheck
from allspan.client.gateway.config import LimitsConfig
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.text.helper_process import HelperProcess
from support.chat_tokenizer import VOCAB_SIZE, chat_tokenizer

ENDINGS = ("KILL", "TERM", "INT", "QUIT", "HUP", "ABRT", "SEGV", "BUS", "ILL", "FPE", "USR1", "USR2", "PIPE", "XCPU")
pytestmark = pytest.mark.timeout(120)


@contextlib.asynccontextmanager
async def checking() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig(grammar_timeout=20.0))
    try:
        yield check
    finally:
        await check.close()


def grammars() -> list[Grammar]:
    """Each a new one, so that none is answered from what is kept."""
    kinds = [("regex", "a{%d}"), ("json_schema", '{"const": %d}'), ("grammar", 'start: "%d"'), ("choice", '["%d"]')]
    return [Grammar(kind, text % number) for number in range(1, 100) for kind, text in kinds]


def children(check: GrammarCheck) -> list[int]:
    return [child.pid for child in list(check._children._idle)]


async def test_a_child_that_any_signal_ends_while_idle_costs_no_grammar() -> None:
    each = iter(grammars())
    async with checking() as check:
        for name in ENDINGS:
            await check.check(next(each), "guided_regex")
            for pid in children(check):
                os.kill(pid, getattr(signal, f"SIG{name}"))
            await check.check(next(each), "guided_regex")  # at once, before anybody has noticed


async def test_a_child_that_died_a_while_ago_costs_no_grammar() -> None:
    each = iter(grammars())
    async with checking() as check:
        for pause_s in (0.0, 0.001, 0.01, 0.05, 0.2):
            await check.check(next(each), "guided_regex")
            for pid in children(check):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(pause_s)
            await check.check(next(each), "guided_regex")


async def test_all_grammars_of_a_crowd_pass_while_children_are_killed_now_and_then() -> None:
    killed: set[int] = set()
    passed = 0
    async with checking() as check:

        async def pass_one(grammar: Grammar) -> None:
            nonlocal passed
            await check.check(grammar, "guided_regex")
            passed += 1
            if passed % 20 == 0:
                ready = [child for child in check._children._all if child._greeting is None]  # idle or at work
                for child in ready:
                    child.kill()
                    killed.add(child.pid)

        await asyncio.gather(*map(pass_one, grammars()[:100]))
    assert passed == 100
    assert len(killed) >= 3, "those that were killed had others after them"


@pytest.mark.parametrize("name", ["KILL", "TERM"])
async def test_a_child_that_is_ended_at_work_leaves_its_grammar_to_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, met = HelperProcess._exchange, []

    def end(pid: int) -> None:
        os.kill(pid, getattr(signal, f"SIG{name}"))
        os.kill(pid, signal.SIGCONT)

    def met_at_work(child: HelperProcess, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        if "kind" in question and not met:
            met.append(child.pid)
            os.kill(child.pid, signal.SIGSTOP)  # so that it has the question, and no answer yet
            threading.Timer(0.05, end, (child.pid,)).start()
        return exchange(child, question, within_s)

    monkeypatch.setattr(HelperProcess, "_exchange", met_at_work)
    async with checking() as check:
        await check.check(Grammar("regex", "a{7}"), "guided_regex")
        assert met[0] not in children(check)


async def test_a_grammar_that_is_wrong_is_blamed_whatever_happens_to_children() -> None:
    async with checking() as check:
        for number in range(5):
            with pytest.raises(InvalidRequest):
                await check.check(Grammar("regex", f"a({number}"), "guided_regex")
            for pid in children(check):
                os.kill(pid, signal.SIGKILL)
