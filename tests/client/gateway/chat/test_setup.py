"""What templates make of tools and thinking is found out by trying; what they do not know is written for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allspan.client.gateway.chat.messages import read_messages
from allspan.client.gateway.chat.reader import Reading
from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering, Traits, traits_of
from allspan.client.gateway.config import ChatConfig
from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.text.chat_template import ChatTemplate
from support.chat_tokenizer import TEMPLATE, chat_tokenizer

LOOP = "{% for m in messages %}"
TURN = "<|{{ m.role }}|>{{ m.content }}"
ASK = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = LOOP + TURN + ASK
LISTED = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
CALLS = "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
QWEN = LISTED + LOOP + CALLS + "{% else %}" + TURN + "{% endif %}" + ASK
"""Arguments are an object."""
DEEPSEEK = (
    LOOP
    + "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + ':' + c.function.arguments }}"
    + "{% endfor %}{% else %}"
    + TURN
    + "{% endif %}"
    + ASK
    + "{% if add_generation_prompt %}<think>\n{% endif %}"
)
"""Arguments are text; a message with calls is known by its content."""
NO_SYSTEM = LOOP + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURN + ASK
LLAMA = LISTED.replace("tools>", "python_tag|>") + QWEN.replace("<tool_call>", "<|python_tag|>").replace(LISTED, "")
SWITCH = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def conversation(arguments: str = '{"a": "ü"}') -> list[dict[str, Any]]:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return read_messages(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
            {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
        ]
    )


def setup(template: str, **config: Any) -> ChatSetup:
    return ChatSetup.of(chat_tokenizer(template), ChatConfig(**config))


def render(template: str, messages: Any, how: Rendering = Rendering(), **config: Any) -> str:  # noqa: B008
    return setup(template, **config).render(messages, how, 5.0)


@pytest.mark.parametrize(
    ("template", "traits"),
    [
        (PLAIN, Traits(tools=False, calls=False, system=True)),
        (QWEN, Traits(tools=True, calls=True, system=True)),
        (DEEPSEEK, Traits(tools=False, calls=True, system=True, arguments_are_text=True, empty_is_none=True)),
        (NO_SYSTEM, Traits(tools=False, calls=False, system=False)),
        ("{{ raise_exception('never') }}", Traits(tools=False, calls=False, system=False)),
    ],
    ids=["plain", "qwen", "deepseek", "no system", "nothing"],
)
def test_traits_are_found_out_by_trying(template: str, traits: Traits) -> None:
    assert traits_of(ChatTemplate(template)) == traits


@pytest.mark.parametrize(
    ("template", "form", "opening"),
    [
        (PLAIN, "hermes", None),
        (QWEN, "hermes", None),
        (LLAMA, "llama3_json", None),
        (PLAIN + "[TOOL_CALLS]", "mistral", None),
        (LISTED + PLAIN + "{# <|tool_call|> #}", "granite", None),
        (LISTED + PLAIN, "generic", None),
        (DEEPSEEK, "hermes", "<think>"),
        (PLAIN + "{# [THINK] #}", "hermes", "[THINK]"),
    ],
    ids=range(8),
)
def test_formats_are_those_that_the_template_shows(template: str, form: str, opening: str | None) -> None:
    made = setup(template)
    assert made.form.name == form
    assert (made.tags.pairs[0][0] if made.tags else None) == opening
    assert setup(template, tool_call_parser="llama3_json").form.name == "llama3_json"
    assert setup(template, reasoning_parser="none").tags is None
    named = setup(template, reasoning_parser="deepseek_r1").tags
    assert named is not None
    assert named.name == "deepseek_r1"


def test_template_that_knows_tools_gets_them_as_it_wants() -> None:
    text = render(QWEN, conversation(), Rendering(tools=[TOOL]))
    assert text.startswith(f"<tools>{json.dumps([TOOL])}</tools><|user|>Hi")
    assert '<tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call><|tool|>rain' in text
    assert text.endswith("<|assistant|>")
    assert 'f:{"a": "ü"}<|tool|>rain' in render(DEEPSEEK, conversation())


def test_arguments_that_are_no_object_are_shown_as_they_were_written() -> None:
    assert '"arguments": "{broken"' in render(QWEN, conversation("{broken"))
    assert '"arguments": {}' in render(QWEN, conversation(""))
    assert '"arguments": "{broken"' in render(PLAIN, conversation("{broken"))


def test_tools_are_taught_to_a_template_that_knows_none() -> None:
    how = Rendering(tools=[TOOL])
    text = render(PLAIN, conversation(), how)
    assert text.startswith("<|system|>You may call one or more functions")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert text.endswith(f"<|user|>Hi<|assistant|>{call}<|user|>{results}<|assistant|>")
    system = [{"role": "system", "content": "Be brief."}, *conversation()]
    assert render(PLAIN, system, how).startswith("<|system|>Be brief.\n\nYou may call")
    assert render(NO_SYSTEM, conversation(), how).startswith("<|user|>You may call")
    assert "</tool_call>\n\nHi<|assistant|>" in render(NO_SYSTEM, conversation(), how)
    taught = render(PLAIN, conversation(), how, tool_call_parser="llama3_json")
    assert '<|assistant|>{"name": "f", "parameters": {"a": "ü"}}<|user|>' in taught


def test_last_message_goes_on_where_it_ends() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon "}]
    how = Rendering(continues=True)
    assert render(TEMPLATE, messages, how) == "<|user|>Hi<|assistant|>Once upon "
    assert render(LOOP + TURN + "</s>" + ASK, messages, how) == "<|user|>Hi</s><|assistant|>Once upon "
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        render("{{ messages[0].content }}", messages, how)


def test_thinking_that_the_template_begins_ends_at_once_under_a_grammar() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert render(DEEPSEEK, messages).endswith("<|assistant|><think>\n")
    assert render(DEEPSEEK, messages, Rendering(think=False)).endswith("<|assistant|><think>\n\n</think>\n\n")
    assert render(SWITCH, messages, Rendering(think=False)).endswith("<|assistant|><think>\n\n</think>\n\n")
    assert render(SWITCH, messages).endswith("<|assistant|>")


def test_prompt_that_ends_in_thinking_is_known_by_its_tokens() -> None:
    tokenizer = chat_tokenizer(DEEPSEEK)
    made = ChatSetup.of(tokenizer, ChatConfig())
    assert made.opened(tokenizer.encode("<|assistant|><think>\n")) == "<think>"
    assert made.opened(tokenizer.encode("<|assistant|><think>\n\n</think>\n\n")) == ""
    assert made.opened(tokenizer.encode("a <think> b")) == ""
    assert setup(PLAIN).opened([60]) == ""


def test_marks_that_are_control_tokens_are_seen_by_who_looks_for_them() -> None:
    tokenizer = chat_tokenizer(PLAIN, "<|python_tag|>")
    made = ChatSetup.of(tokenizer, ChatConfig(tool_call_parser="llama3_json"))
    (region,) = [region for region in made.form.regions if region.open]
    assert region.open == "<|python_tag|>"
    plain = made.tokenizer_for(Reading())
    assert plain is made.tokenizer
    shown = made.tokenizer_for(Reading(form=made.form))
    ids = shown.encode("<|python_tag|>{}<|user|>")
    assert shown.decode(ids) == "<|python_tag|>{}"
    assert plain.decode(ids) == "{}"


def test_variables_are_those_that_the_server_lets_requests_set() -> None:
    made = setup(PLAIN, allow_chat_template_kwargs=("enable_thinking",))
    made.check_variables({"enable_thinking": False})
    with pytest.raises(InvalidRequest, match="'tokenize', which this server does not let requests set"):
        made.check_variables({"tokenize": True})
    with pytest.raises(InvalidRequest, match="enable_thinking is a list"):
        made.check_variables({"enable_thinking": [1]})
    with pytest.raises(InvalidRequest, match="at most 256 characters"):
        made.check_variables({"enable_thinking": "x" * 257})
    for name in ("messages", "tools", "tokenize", "chat_template", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=f"--allow-chat-template-kwargs has {name}"):
            setup(PLAIN, allow_chat_template_kwargs=("enable_thinking", name))


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "function", "content": "x"}, ".role is 'function', which is obsolete"),
    ({"role": {}, "content": "x"}, ".role is {}"),
    ({"role": "assistant"}, ".content is None"),
    ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call is"),
    ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "only text is supported"),
    ({"role": "assistant", "tool_calls": {}, "content": 1}, ".content is 1"),
    ({"role": "assistant", "tool_calls": 3}, ".tool_calls is 3, must be a list"),
    ({"role": "assistant", "tool_calls": ["x"]}, ".tool_calls[0] is 'x'"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, ".tool_calls[0] is"),
    ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}, "[0].function.arguments is None"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, ".tool_calls[0].id is None"),
    ({"role": "assistant", "tool_calls": [{}] * 129}, ".tool_calls has 129 entries, at most 128"),
    ({"role": "tool", "content": "x"}, ".tool_call_id is None"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0] is of type 'input_audio': only text"),
    ({"role": "user", "content": [{"type": "file", "file": {}}]}, ".content[0] is of type 'file': only text"),
    ({"role": "user", "content": [{"type": {}}]}, ".content[0] is"),
    ({"role": "user", "content": "x", "name": 7}, ".name is 7"),
]


@pytest.mark.parametrize(("message", "words"), MESSAGES, ids=range(len(MESSAGES)))
def test_messages_that_do_not_fit_are_refused_by_their_place(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages([{"role": "user", "content": "x"}, message])
    assert f"messages[1]{words}" in caught.value.message or words in caught.value.message
    assert "messages[1]" in caught.value.message
    assert caught.value.field == "messages"


def test_messages_come_in_the_form_that_templates_know() -> None:
    read = read_messages(
        [
            {"role": "developer", "content": "d", "name": "n"},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "reasoning": "hm"},
            *conversation(),
        ]
    )
    assert read[:3] == [
        {"role": "system", "content": "d", "name": "n"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "never", "reasoning_content": "hm"},
    ]
    assert read[5] == {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "f"}
    assert read[6] == {"role": "tool", "content": "sun", "tool_call_id": "call_2"}
