"""What the compiled grammars of a model share: a tokenizer's table, made ahead or at the first grammar."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from allspan.protos.api.errors import CheckpointError
from allspan.protos.api.grammar import Grammar
from allspan.protos.text import Tokenizer
from allspan.worker.sampling.grammar_cache import Grammars
from support.byte_tokenizer import byte_tokenizer


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


def test_the_table_is_made_ahead_and_the_first_grammar_finds_it() -> None:
    loads = []

    def load() -> Tokenizer:
        loads.append(time.monotonic())
        return byte_tokenizer()

    grammars = Grammars("-", 300)
    grammars.load_tokenizer = load
    grammars.warm_up(0.0)
    wait_for(lambda: grammars._compiler is not None)
    grammars.compiled(Grammar("regex", "[a-z]+"))
    assert len(loads) == 1


def test_a_model_without_a_tokenizer_is_logged_and_left_to_the_first_grammar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def load() -> Tokenizer:
        raise CheckpointError("no tokenizer.json here")

    grammars = Grammars("-", 300)
    grammars.load_tokenizer = load
    grammars.warm_up(0.0)
    wait_for(lambda: "no tokenizer.json here" in caplog.text)
