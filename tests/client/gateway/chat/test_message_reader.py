"""From a model's text to a message: tool calls, thinking, and nothing lost, however the text is cut."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.client.gateway.chat.formats import FORMATS
from allspan.client.gateway.chat.pieces import CallArguments, CallStart, Content, Message
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.chat.thinking import TAGS

NAMES = ("get_weather", "f")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "n": [1, 2.5e3, {"a": null}]}}'
ARGUMENTS = '{"city": "Paris", "n": [1, 2.5e3, {"a": null}]}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

Seen = tuple[str | None, str | None, list[tuple[str, str]]]
"""Content, thinking, calls."""


def read(reading: Reading, *deltas: str) -> Seen:
    message = Message()
    reader = MessageReader(reading)
    for pieces in [*(reader.push(delta) for delta in deltas), reader.finish()]:
        for piece in pieces:
            message.add(piece)
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def tools(form: str = "hermes", **more: Any) -> Reading:
    return Reading(form=FORMATS[form], names=NAMES, **more)


def one(arguments: str, name: str = "get_weather") -> list[tuple[str, str]]:
    return [(name, arguments)]


def hermes(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", None, one(ARGUMENTS)),
    ("hermes", f"Let me see.\n\n{hermes(WEATHER)}\n", "Let me see.", one(ARGUMENTS)),
    ("hermes", f"{hermes(WEATHER)}\n{hermes(WEATHER)}", None, 2 * one(ARGUMENTS)),
    ("hermes", hermes(f"{WEATHER}\n{WEATHER}"), None, 2 * one(ARGUMENTS)),
    ("hermes", hermes(f"[{WEATHER}, {WEATHER}]"), None, 2 * one(ARGUMENTS)),
    ("hermes", f"{hermes(WEATHER)} Done.", "Done.", one(ARGUMENTS)),
    ("hermes", f"One. {hermes(WEATHER)} Two.", "One. Two.", one(ARGUMENTS)),
    ("hermes", f"<tool_call>{WEATHER}", None, one(ARGUMENTS)),
    ("hermes", hermes('{"name": "f", "arguments": {}}'), None, one("{}", "f")),
    ("hermes", hermes('{"name": "f"}'), None, one("{}", "f")),
    ("hermes", hermes('{"name": "unknown", "arguments": {}}'), None, one("{}", "unknown")),
    ("hermes", hermes('{"arguments": {"a": 1}, "name": "f"}'), None, one('{"a": 1}', "f")),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), None, one('{"a": 1}', "f")),
    ("hermes", hermes('{"name": "f", "arguments": {"a": 1}'), None, one('{"a": 1}', "f")),
    ("hermes", hermes('{"name": "f", "arguments": {"a": "</tool_call>"}}'), None, one('{"a": "</tool_call>"}', "f")),
    ("hermes", hermes('{"name": "f", "arguments": {"a": "x\ny"}}'), None, one('{"a": "x\\ny"}', "f")),
    ("hermes", hermes('{"type": "function", "function": {"name": "f", "arguments": {}}}'), None, one("{}", "f")),
    ("hermes", f"<tool_call>junk {hermes(WEATHER)}", "<tool_call>junk", one(ARGUMENTS)),
    ("hermes", f"<tool_call>{WEATHER} bye", "bye", one(ARGUMENTS)),
    # malformed once it is a call: the arguments as the model wrote them
    ("hermes", hermes('{"name": "f", "arguments": {"a": tru}}\n') + "x", "x", one('{"a": tru}', "f")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', None, one('{"a": "b', "f")),
    ("llama3_json", LLAMA, None, one('{"city": "Paris"}')),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", None, 2 * one('{"city": "Paris"}')),
    ("llama3_json", f"{LLAMA}\n{LLAMA}", None, 2 * one('{"city": "Paris"}')),
    ("llama3_json", f"\n[{LLAMA}]", None, one('{"city": "Paris"}')),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", None, 2 * one(ARGUMENTS)),
    ("mistral", f"[TOOL_CALLS]{WEATHER}", None, one(ARGUMENTS)),
    ("granite", f"<|tool_call|>[{WEATHER}, {WEATHER}]", None, 2 * one(ARGUMENTS)),
    ("granite", f"See. <tool_call>[{WEATHER}]", "See.", one(ARGUMENTS)),
    ("generic", WEATHER, None, one(ARGUMENTS)),
    ("generic", f"```json\n{WEATHER}\n```\nthere", "there", one(ARGUMENTS)),
    ("generic", f"[TOOL_CALLS] [{WEATHER}]", None, one(ARGUMENTS)),
    ("generic", hermes(WEATHER), None, one(ARGUMENTS)),
    ("generic", f"<function_call>{WEATHER}</function_call>", None, one(ARGUMENTS)),
]  # fmt: skip
TEXTS = [
    ("hermes", "just text"),
    ("hermes", "a < b <tool_ca"),
    ("hermes", f" {hermes('not json')} "),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", hermes("{'name': 'f'}")),
    ("hermes", hermes('{"name": "f", "arguments": {a}}')),
    ("hermes", hermes('{"name": 5, "arguments": {}}')),
    ("hermes", hermes('{"name": "f", "arguments": [1]}')),
    ("hermes", hermes('{"name": "\\ud800", "arguments": {}}')),
    ("hermes", hermes('{"arguments": {"a": ' + "1" * 5000 + '}, "name": "f"}')),
    ("hermes", hermes("[" * 5000)),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", "[1] says so"),
    ("llama3_json", f"Sure: {LLAMA}"),
    ("llama3_json", '<|python_tag|>brave.call("x")'),
    ("mistral", "[TOOL"),
    ("generic", 'So:\n```json\n{"name": "x"}\n```'),
    ("generic", '{"arguments": {"a": [{}]}}'),
]


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_call_is_text_to_the_last_letter(form: str, text: str) -> None:
    assert read(tools(form), text) == (text, None, [])
    assert read(tools(form), *text) == (text, None, [])


@pytest.mark.parametrize(("form", "text", "content", "found"), CASES, ids=range(len(CASES)))
def test_calls_are_found_beside_text(form: str, text: str, content: str | None, found: list[tuple[str, str]]) -> None:
    assert read(tools(form), text) == (content, None, found)
    assert read(tools(form), *text) == (content, None, found)


THOUGHTS: list[tuple[str, str, str, str | None, str | None]] = [
    ("qwen3", "", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    ("qwen3", "", "yes <think>no</think>", None, "yes <think>no</think>"),
    ("qwen3", "", "<think>\n\n</think>\n\nyes", None, "yes"),
    ("qwen3", "", "<think>hm </thi", "hm </thi", None),
    ("qwen3", "", "<thin", None, "<thin"),
    ("qwen3", "<think>", "hm\n</think>\n\nyes", "hm", "yes"),
    ("qwen3", "<think>", "<think>hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "hm</think>yes </think>", "hm", "yes </think>"),
    ("deepseek_r1", "", "still at it", "still at it", None),
    ("generic", "", "[THINK]a[/THINK]b", "a", "b"),
    ("generic", "", " <thought>a</think></thought> b", "a</think>", "b"),
]


@pytest.mark.parametrize(("tags", "opened", "text", "thinking", "content"), THOUGHTS, ids=range(len(THOUGHTS)))
def test_thinking_is_told_from_the_answer(
    tags: str, opened: str, text: str, thinking: str | None, content: str | None
) -> None:
    reading = Reading(TAGS[tags], opened)
    assert read(reading, text) == (content, thinking, [])
    assert read(reading, *text) == (content, thinking, [])


def test_a_call_in_the_thinking_is_none() -> None:
    text = f"<think>maybe <tool_call>{WEATHER}</tool_call></think><tool_call>{WEATHER}</tool_call>"
    assert read(tools(tags=TAGS["qwen3"]), text) == (None, f"maybe <tool_call>{WEATHER}</tool_call>", one(ARGUMENTS))
    assert read(tools(tags=TAGS["qwen3"], tell_reasoning=False), text) == (None, None, one(ARGUMENTS))


def test_first_of_several_calls_counts_when_they_may_not_be_parallel() -> None:
    text = f"<tool_call>{WEATHER}</tool_call>" + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(tools(parallel=False), text) == (None, None, one(ARGUMENTS))


def test_name_comes_first_then_the_arguments_as_they_are_written() -> None:
    reader = MessageReader(tools())
    deltas = ("Ok.\n<tool", '_call>{"name": "f", "arguments": {', '"a": ', '"b"', "}}</tool_call>")
    told = [reader.push(delta) for delta in deltas]
    (start, _) = told[2]
    assert isinstance(start, CallStart)
    assert re.fullmatch("call_[0-9a-f]{24}", start.id)
    assert told == [
        [Content("Ok.")],
        [],
        [CallStart(0, start.id, "f"), CallArguments(0, '{"a": ')],
        [CallArguments(0, '"b"')],
        [CallArguments(0, "}")],
    ]
    assert reader.finish() == []


FRAGMENTS = [
    *(WEATHER, LLAMA, '{"name": "f", "arguments": {"a": "\\u00e9', '{"name": "f", "arguments": {}}', '"}}'),
    *('{"arguments": {"b": tru', '{"arguments": {}, "name": "f"}', "[", "]", "{", "}", '"', "\\", "\x00", ":", "1e5"),
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "```json", "```", "\n", " ", "; ", ", "),
    *("<think>", "</think>", "<thought>", "text", "é🦊"),
    *(" " * 1100, "}" * 1100, "a" * 1100),  # more than a reader holds back
]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    form=st.sampled_from([*FORMATS, ""]),
    tags=st.sampled_from([*TAGS, ""]),
    opened=st.sampled_from(["", "<think>"]),
    seed=st.integers(0, 99),
)
def test_any_split_gives_the_same_message_and_loses_nothing(
    parts: list[str], form: str, tags: str, opened: str, seed: int
) -> None:
    text = "".join(parts)
    reading = Reading(TAGS.get(tags), opened, form=FORMATS.get(form), names=NAMES)
    whole = read(reading, text)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reading, *pieces) == whole
    assert read(reading, *text) == whole
    if not form and not tags:
        assert whole[0] == (text or None)
    if form and not tags and not reading.marks and not whole[2]:
        assert (whole[0] or "") == text


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_format_writes_it_reads(form: str) -> None:
    row = FORMATS[form]
    text = row.separator.join(row.written(name, {"a": "ü"}) for name in NAMES)
    assert read(tools(form), text) == (None, None, [(name, '{"a": "ü"}') for name in NAMES])
    assert json.dumps({"x": 1}) in row.instructions([{"x": 1}])
