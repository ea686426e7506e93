"""Random grammars under a model that knows nothing: what ends by itself is of the language, and how a request is worked
on (alone, among others, in chunks, put out, on two ranks) changes nothing."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allspan.protos.api.grammar import Grammar
from allspan.worker.engine.core import EngineCore
from allspan.worker.scheduler.request import Request
from support.byte_tokenizer import byte_tokenizer
from support.cores import Collected, fake_core, request, step_until_idle
from support.threads import ThreadWorld

EOS, VOCAB, MOST = 256, 260, 28
PLAYS = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])

integers = st.integers(-40, 40).flatmap(
    lambda low: st.integers(low, 60).map(lambda high: {"type": "integer", "minimum": low, "maximum": high})
)
leaves = (
    integers
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[ab]{0,3}$"}])
    | st.lists(st.sampled_from(["x", "yy", 3, -1, True, None, 'q"']), min_size=1, max_size=3).map(lambda v: {"enum": v})
)
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(inner, st.integers(0, 2)).map(
            lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[1] + 1}
        )
        | st.dictionaries(st.sampled_from(["a", "b", "cd"]), inner, min_size=1, max_size=2).map(
            lambda p: {"type": "object", "properties": p, "required": [*p], "additionalProperties": False}
        )
        | st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})
    ),
    max_leaves=4,
)
patterns = st.recursive(
    st.sampled_from(["a", "b", "[a-c]", "[^a-y\\x00-\\x20\\x7f-\\U0010ffff]", "\\d", "é", "\\."]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})")
        | st.tuples(inner, st.sampled_from(["?", "{1,3}", "{2}", "+"])).map(lambda two: f"({two[0]}){two[1]}")
    ),
    max_leaves=6,
)
grammars = (
    schemas.map(lambda schema: Grammar("json_schema", json.dumps(schema)))
    | patterns.map(lambda pattern: Grammar("regex", pattern))
    | st.lists(st.text("ab c", min_size=1, max_size=6), min_size=1, max_size=4).map(
        lambda choices: Grammar("choice", json.dumps(choices))
    )
)
asked = st.tuples(grammars, st.integers(1, 20), st.sampled_from([0.0, 1.0]))


def holds(schema: dict[str, Any], value: Any) -> bool:
    """Whether a JSON value is what one of `schemas` describes."""
    if "anyOf" in schema:
        return any(holds(option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    kind = {"integer": int, "boolean": bool, "null": type(None), "string": str, "array": list, "object": dict}
    if type(value) is not kind[schema["type"]]:
        return False
    if schema["type"] == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if schema["type"] == "string":
        return re.fullmatch(schema["pattern"], value) is not None
    if schema["type"] == "array":
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(holds(schema["items"], each) for each in value)
    if schema["type"] == "object":
        inner = schema["properties"]
        return value.keys() == inner.keys() and all(holds(inner[name], each) for name, each in value.items())
    return True


def is_of(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "json_schema":
        return holds(json.loads(grammar.text), json.loads(text))
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text, re.ASCII) is not None
    return text in grammar.choices


def requests(plan: list[tuple[Grammar, int, float]]) -> list[Request]:
    return [
        request(n, b"abcdefghijklmnopqrst"[:length], max_tokens=MOST, temperature=temperature, grammar=grammar)
        for n, (grammar, length, temperature) in enumerate(plan, start=1)
    ]


def core_of(collected: Collected, num_pages: int = 64, **options: Any) -> EngineCore:
    core, _ = fake_core(num_pages, collected, (EOS,), widths=options.pop("widths", (VOCAB,)), **options)
    core.grammars.load_tokenizer = byte_tokenizer
    return core


def played(plan: list[tuple[Grammar, int, float]], **options: Any) -> list[list[int]]:
    collected = Collected()
    core = core_of(collected, **options)
    made = requests(plan)
    for each in made:
        core.submit(each)
    step_until_idle(core)
    assert not collected.errors
    return [collected.tokens(each) for each in made]


@PLAYS
@given(st.lists(asked, min_size=1, max_size=4))
def test_what_ends_is_of_the_language_and_no_way_of_working_changes_a_token(plan: list[tuple[Any, int, float]]) -> None:
    together = played(plan)
    for (grammar, _, _), tokens in zip(plan, together, strict=True):
        if tokens[-1] == EOS:
            text = bytes(tokens[:-1]).decode()
            assert is_of(grammar, text), (grammar, text)
        else:
            assert len(tokens) == MOST
    alone = requests(plan)
    for each, tokens in zip(alone, together, strict=True):
        collected = Collected()
        core = core_of(collected)
        core.submit(each)
        step_until_idle(core)
        assert collected.tokens(each) == tokens
    assert played(plan, max_num_batched_tokens=5) == together
    assert played(plan, num_pages=13) == together  # one at a time has place, or nearly so
    assert ranked(plan) == together


def ranked(plan: list[tuple[Grammar, int, float]]) -> list[list[int]]:
    world, collected = ThreadWorld(2), Collected()
    cores = [
        core_of(
            collected,
            num_pages=20,
            collectives=world.collectives[rank],
            channel=world.channels[rank],
            widths=(200, VOCAB - 200),
        )
        for rank in range(2)
    ]
    made = requests(plan)
    for each in requests(plan):
        cores[1].submit(each)
    for each in made:
        cores[0].submit(each)

    def stop() -> None:
        cores[0].stop_model(60.0)
        cores[0].shutdown()

    threading.Thread(target=stop, daemon=True).start()
    world.run(lambda rank: cores[rank].run())
    assert not collected.errors
    return [collected.tokens(each) for each in made]
