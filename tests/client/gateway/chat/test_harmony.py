"""gpt-oss's messages: channels told apart however the text is cut, prompts, grammars and control tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.client.gateway.chat.enforce import calls_grammar
from allspan.client.gateway.chat.formats import FORMATS, MARKS
from allspan.client.gateway.chat.harmony import FINAL
from allspan.client.gateway.chat.pieces import Message
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering
from allspan.client.gateway.chat.thinking import TAGS, ThoughtCounter
from allspan.client.gateway.chat.tools import read_tools
from allspan.client.gateway.config import ChatConfig
from allspan.client.gateway.openai.chat_request import ChatRequest, read_chat
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from support.chat_tokenizer import chat_tokenizer
from support.gateway import fake_engine, gateway

FORM, TAGGED = FORMATS["harmony"], TAGS["harmony"]
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}// {{ t.function.description + '\n' }}"
    "type {{ t.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments|tojson }}<|call|>"
    "{% set last.name = f.name %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content|tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""What gpt-oss's own does, in short."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
USER = {"role": "user", "content": "Hi"}
ANALYSIS, NEXT = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": [1]}<|call|>'

Seen = tuple[str | None, str | None, list[tuple[str, str]]]
"""Content, thinking, calls."""


def read(text: list[str] | str, form: bool = True, opened: str = "", **more: Any) -> Seen:
    message, reader = Message(), MessageReader(Reading(TAGGED, opened, form=FORM if form else None, **more))
    for pieces in [*(reader.push(each) for each in ([text] if isinstance(text, str) else text)), reader.finish()]:
        for piece in pieces:
            message.add(piece)
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


CASES: list[tuple[str, Seen]] = [
    (f"{ANALYSIS}{NEXT}{FINAL}yes<|return|>", ("yes", "hm", [])),
    (f"{ANALYSIS}{NEXT}{FINAL}yes", ("yes", "hm", [])),
    (f"{ANALYSIS}{NEXT}{CALL}", (None, "hm", [("f", '{"a": [1]}')])),
    (f"{ANALYSIS}{NEXT} to=functions.g.h-1<|channel|>commentary json<|message|>[1]", (None, "hm", [("g.h-1", "[1]")])),
    (" to=functions.f<|channel|>commentary<|message|><|call|>", (None, None, [("f", "{}")])),
    (f"{CALL}{NEXT}{CALL}", (None, None, [("f", '{"a": [1]}')] * 2)),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", ("I look.", None, [("f", '{"a": [1]}')])),
    (f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}{FINAL}yes", ("yes", "hm\nhm", [])),
    (f"<|channel|>commentary<|message|>a<|end|>{NEXT}{FINAL}b", ("a\nb", None, [])),
    ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", (None, "{}", [])),
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>yes", ("yes", "hm", [])),
    ("<|channel|>analysis<|message|>breaks o", (None, "breaks o", [])),
    ("<|channel|>anal", (None, None, [])),
    (f"{FINAL}a < b <|end", ("a < b <|end", None, [])),
    ("just text", ("just text", None, [])),
    (" to=Paris", (" to=Paris", None, [])),
    (f"<|channel|>{'x' * 1024}", ("x" * 1024, None, [])),
    (f"{ANALYSIS}{NEXT}{'x' * 1024}{ANALYSIS}", ("assistant" + "x" * 1024, "hm\nhm", [])),
    ("", (None, None, [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "seen"), CASES, ids=range(len(CASES)))
def test_channels_are_reasoning_answers_and_calls(text: str, seen: Seen) -> None:
    assert read(text) == seen
    assert read(list(text)) == seen


FRAGMENTS = [
    *MARKS,
    ANALYSIS,
    CALL,
    FINAL,
    NEXT,
    "text",
    " ",
    "\n",
    " to=functions.f",
    "commentary",
    '{"a": 1}',
    "<|",
    "to",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), seed=st.integers(0, 99))
def test_any_split_gives_the_same_message(parts: list[str], seed: int) -> None:
    text = "".join(parts)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read(list(text)) == read(text)


def test_what_a_request_asks_for_decides_where_reasoning_and_calls_go() -> None:
    text = f"{ANALYSIS}{NEXT}{CALL}"
    assert read(text, tell_reasoning=False) == (None, None, [("f", '{"a": [1]}')])
    assert read(text, form=False) == ('{"a": [1]}', "hm", [])
    assert read(f"{ANALYSIS}{NEXT}{FINAL}yes", separates=False) == ("hm\nyes", None, [])
    assert read(f"{CALL}{NEXT}{CALL}", parallel=False) == (None, None, [("f", '{"a": [1]}')])
    assert read("yes<|return|>", opened=FINAL) == ("yes", None, [])


def test_arguments_come_as_they_are_written() -> None:
    reader, found = MessageReader(Reading(TAGGED, form=FORM)), []
    for text in ("<|channel|>commentary to=functions.f <|constrain|>json<|mess", 'age|>{"a"', ": 1}<|ca", "ll|>"):
        found.append([getattr(piece, "text", None) or getattr(piece, "name", None) for piece in reader.push(text)])
    assert found == [[], ["f", '{"a"'], [": 1}"], []]


def setup(**config: Any) -> ChatSetup:
    return ChatSetup.of(chat_tokenizer(TEMPLATE, *MARKS), ChatConfig(**config))


def test_the_template_tells_the_format_and_marks_stay_visible_for_the_reader() -> None:
    made = setup()
    assert made.form is FORM
    assert made.tags is TAGGED
    shown = made.tokenizer_for(Reading(made.tags))
    text = f"{ANALYSIS}{NEXT}{CALL}"
    assert shown.decode(shown.encode(f"<|user|>{text}")) == text
    assert "<|" not in made.tokenizer.decode(made.tokenizer.encode(text))


def test_earlier_reasoning_calls_and_tools_are_shown_as_the_template_wants() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    text = setup().render(messages, Rendering(tools=[TOOL]))
    assert "// \ntype f" in text
    assert ANALYSIS in text
    assert 'assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>' in text
    assert text.endswith(
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant'
    )
    messages[1]["content"] = "I look."
    assert "hm" not in setup().render(messages, Rendering(tools=[TOOL]))  # one of the two, as the template says


def reading(made: ChatSetup, **fields: Any) -> tuple[Reading, str]:
    chat = read_chat(ChatRequest(**{"messages": [USER]} | fields), made)
    text = made.render(chat.messages, chat.rendering)
    return chat.reading(made, made.tokenizer.encode(text)), text


def test_prompts_end_where_the_output_begins() -> None:
    made = setup()
    plain, text = reading(made)
    assert text.endswith(f"<|end|>{NEXT}")
    assert plain.opened == ""
    last = {"role": "assistant", "content": "Once"}
    going_on, text = reading(made, messages=[USER, last], continue_final_message=True)
    assert text.endswith(f"{FINAL}Once")
    assert going_on.opened == FINAL
    required, text = reading(made, tools=[TOOL], tool_choice="required")
    assert text.endswith(NEXT)  # the grammar lets it think
    assert (required.opened, required.form) == ("", FORM)


def test_the_answer_of_a_grammar_begins_in_the_final_channel() -> None:
    made = setup()
    text = made.render([USER], Rendering(think=False))
    assert text.endswith(NEXT + FINAL)
    assert made.opened(made.tokenizer.encode(text)) == FINAL


def test_reasoning_tokens_are_counted_with_their_marks() -> None:
    tokenizer = chat_tokenizer(TEMPLATE, *MARKS)
    counter = ThoughtCounter(TAGGED, "", tokenizer.codec.piece)
    counter.push(tokenizer.encode(f"{ANALYSIS}{NEXT}{FINAL}yes"))
    assert counter.count == len(tokenizer.encode(ANALYSIS))
    plain = ThoughtCounter(TAGGED, FINAL, tokenizer.codec.piece)
    plain.push(tokenizer.encode("yes"))
    assert plain.count == 0


@pytest.mark.parametrize(
    ("choice", "strict", "good", "bad"),
    [
        ("required", False, [f"{ANALYSIS}{NEXT}{CALL}", CALL], [f"{FINAL}yes", "yes"]),
        ("auto", True, [CALL, f"{ANALYSIS}{NEXT}{FINAL}yes"], [CALL.replace("[1]", "]"), CALL.replace('"a"', '"b"')]),
    ],
)
def test_grammars_of_calls_have_channels(choice: str, strict: bool, good: list[str], bad: list[str]) -> None:
    llguidance = pytest.importorskip("llguidance")
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "array"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
    grammar = calls_grammar(FORM, read_tools([tool], choice, True))
    assert grammar is not None
    matched = {text: _follows(llguidance, grammar.text, text.removesuffix("<|call|>")) for text in good + bad}
    assert matched == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def _follows(llguidance: Any, grammar: str, text: str) -> bool:
    """Whether a grammar takes all of a text and may end there."""
    tokenizer = chat_tokenizer(TEMPLATE, *MARKS)
    count = tokenizer.codec.vocab_size
    pieces = [tokenizer.codec.piece(i) for i in range(count)]
    special = {i: pieces[i].decode() for i in range(256, count)}

    class Known:
        eos_token_id, bos_token_id, unk_token_id = 257, 256, None
        tokens, special_token_ids = pieces, list(special)

        def __call__(self, data: bytes | str) -> list[int]:
            return list(data.encode() if isinstance(data, str) else data)

    known = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Known()))
    matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text)[1:] if tokenizer.encode(text)[:1] == [256] else tokenizer.encode(text)
    return matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()


def test_a_grammar_beside_tools_is_the_answers() -> None:
    use = read_tools([TOOL], "auto", True)
    grammar = calls_grammar(FORM, use, Grammar("json_schema", json.dumps({"type": "object"})))
    assert grammar is not None
    assert 'final: <|channel|> "final" <|message|> answer' in grammar.text
    with pytest.raises(InvalidRequest, match="only JSON can be told from calls"):
        calls_grammar(FORM, use, Grammar("regex", "x"))


async def test_channels_come_apart_over_http_whole_and_streamed() -> None:
    """Their marks are control tokens, which no other answer shows."""
    tokenizer = chat_tokenizer(TEMPLATE, *MARKS)
    tokens = tuple(tokenizer.encode(f"{ANALYSIS}{NEXT}{CALL}"))
    engine = fake_engine(tokens=tokens, max_model_len=4096, vocab_size=tokenizer.codec.vocab_size)
    body: Any = {"messages": [USER], "tools": [TOOL]}
    async with gateway(engine, tokenizer) as server:
        whole = (await server.post("/v1/chat/completions", **body)).json()
        streamed = await server.post("/v1/chat/completions", **body, stream=True)
        anthropic: Any = {"model": "tiny", "max_tokens": 200, "messages": [USER]}
        anthropic = (await server.post("/v1/messages", **anthropic)).json()
    (choice,) = whole["choices"]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"a": [1]}'}]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode(ANALYSIS))
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [each["delta"] for line in lines for each in json.loads(line)["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["name"] == "f"
    assert "".join(call["arguments"] for call in calls) == '{"a": [1]}'
    assert not any(delta.get("content") for delta in deltas)
    assert [each["text"] for each in anthropic["content"]] == ['{"a": [1]}']
