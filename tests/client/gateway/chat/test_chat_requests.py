"""Chat completions over HTTP: how tools, thinking and templates reach the engine, and come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from allspan.client.gateway.chat import setup
from support.chat_scenarios import NAMED, SCRIPTS, STRICT_TOOLS, TOOLS
from support.chat_tokenizer import EOS, TEMPLATE, VOCAB_SIZE, chat_tokenizer
from support.fake_engine import ANSWER
from support.gateway import Gateway, fake_engine, gateway
from support.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SWITCH = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENING = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"


async def prompt(server: Gateway, **body: Any) -> str:
    response = await server.post(CHAT, **({"messages": HI, "max_tokens": 1} | body))
    assert response.status_code == 200, response.text
    return chat_tokenizer().decode(server.engine.last.prompt, skip_special_tokens=False)


async def refusal(server: Gateway, **body: Any) -> tuple[int, str, str]:
    response = await server.post(CHAT, **({"messages": HI} | body))
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_grammar_holds_where_a_call_is_required_or_strict() -> None:
    async with gateway(fake_engine(max_model_len=4096)) as server:
        kinds = {}
        for name, body in {
            "auto": {"tools": TOOLS},
            "required": {"tools": TOOLS, "tool_choice": "required"},
            "named": {"tools": TOOLS, "tool_choice": NAMED},
            "strict": {"tools": STRICT_TOOLS},
            "none": {"tools": STRICT_TOOLS, "tool_choice": "none"},
            "answer": {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "no answer": {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        }.items():
            text = await prompt(server, **body)
            assert ("get_weather" in text) is (name != "none")
            grammar = server.engine.last.params.grammar
            kinds[name] = grammar and grammar.text.splitlines()[0]
    assert kinds == {
        "auto": None,
        "required": "start: calls",
        "named": "start: calls",
        "strict": "start: marked* ANSWER",
        "none": None,
        "answer": "start: calls | answer",
        "no answer": "start: calls",
    }


async def test_auto_tool_choice_can_be_switched_off() -> None:
    async with gateway(fake_engine(max_model_len=4096), enable_auto_tool_choice=False) as server:
        status, param, message = await refusal(server, tools=TOOLS)
        assert (status, param) == (400, "tool_choice")
        assert "--no-enable-auto-tool-choice" in message
        assert "get_weather" in await prompt(server, tools=TOOLS, tool_choice="required")
        assert "get_weather" not in await prompt(server, tools=TOOLS, tool_choice="none")


async def test_thinking_is_on_or_off_as_the_request_says() -> None:
    tokenizer = chat_tokenizer(SWITCH)
    async with gateway(fake_engine(max_model_len=4096), tokenizer) as server:
        assert not (await prompt(server)).endswith("</think>\n\n")
        assert (await prompt(server, reasoning_effort="none")).endswith("<think>\n\n</think>\n\n")
        assert (await prompt(server, tools=TOOLS, tool_choice="required")).endswith("</think>\n\n")
        assert not (await prompt(server, reasoning_effort="low")).endswith("</think>\n\n")
        assert (await prompt(server, chat_template_kwargs={"enable_thinking": False})).endswith("</think>\n\n")
        status, param, message = await refusal(server, chat_template_kwargs={"custom": False})
        assert (status, param) == (400, "chat_template_kwargs")
        assert "--allow-chat-template-kwargs" in message
        assert (await refusal(server, reasoning_effort="lots"))[:2] == (400, "reasoning_effort")
        assert (await refusal(server, chat_template="{{ 1 }}"))[:2] == (400, "chat_template")
        assert (await refusal(server, documents=[{"text": "x"}]))[:2] == (400, "documents")
        assert (await refusal(server, functions=[{"name": "f"}]))[:2] == (400, "functions")
        assert (await refusal(server, function_call="auto"))[:2] == (400, "function_call")
    async with gateway(fake_engine(), tokenizer, allow_chat_template_kwargs=("other",)) as server:
        assert await prompt(server, chat_template_kwargs={"other": False})
        for name in ("messages", "tokenize", "add_generation_prompt", "enable_thinking"):
            status, _, message = await refusal(server, chat_template_kwargs={name: True})
            assert (status, f"chat_template_kwargs has '{name}'" in message) == (400, True)


async def test_output_after_a_prompt_that_opens_the_thinking_is_thinking() -> None:
    engine = fake_engine(tokens=tuple(b"hm\n</think>\n\nyes"))
    async with gateway(engine, chat_tokenizer(OPENING)) as server:
        answer = (await server.post(CHAT, messages=HI)).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("hm\n</think>")}
        assert (await prompt(server, tools=TOOLS[:0])).endswith("<think>\n")
    async with gateway(engine, chat_tokenizer(OPENING), reasoning_parser="none") as server:
        message = (await server.post(CHAT, messages=HI)).json()["choices"][0]["message"]
        assert message["content"] == "hm\n</think>\n\nyes"
        assert "reasoning_content" not in message


async def test_last_message_is_continued() -> None:
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    async with gateway() as server:
        text = await prompt(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert text == "<|user|>Hi<|assistant|>The answer is "
        assert await prompt(server, messages=messages, continue_final_message=True) == text
        assert await prompt(server, messages=messages, add_generation_prompt=False) == text
        assert (await prompt(server, messages=messages)).endswith("The answer is <|assistant|>")
        for wrong in ({"add_generation_prompt": True}, {"messages": HI}):
            body = {"messages": messages, "continue_final_message": True} | wrong
            assert (await refusal(server, **body))[:2] == (400, "continue_final_message")


async def test_token_ids_come_along_when_asked_for() -> None:
    async with gateway() as server:
        answer = (await server.post(CHAT, messages=HI, max_tokens=3, return_token_ids=True)).json()
    assert answer["choices"][0]["token_ids"] == list(b"The")
    assert answer["prompt_token_ids"] == list(server.engine.last.prompt)


async def test_slow_template_is_refused_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "RENDER_S", 2.0)
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = f"{{% if messages[0].content == 'slow' %}}{slow}{{% endif %}}{TEMPLATE}"
    async with gateway(tokenizer=chat_tokenizer(template)) as server:
        begin = time.monotonic()
        waiting = asyncio.create_task(refusal(server, messages=[{"role": "user", "content": "slow"}]))
        longest = 0.0
        while not waiting.done():
            asked = time.monotonic()
            answer = (await server.post(CHAT, messages=HI)).json()
            assert answer["choices"][0]["message"]["content"] == ANSWER
            longest = max(longest, time.monotonic() - asked)
        status, param, message = await waiting
        assert (status, param) == (400, "messages")
        assert message == "the chat template takes too long over these messages: more than 2 s"
        assert time.monotonic() - begin < 20
        assert longest < 1.5


async def test_tool_prompts_count_among_the_characters() -> None:
    long = [{"type": "function", "function": {"name": "f", "description": "x" * 70_000}}]
    async with gateway() as server:
        status, param, message = await refusal(server, tools=long)
    assert (status, param) == (400, "messages")
    assert "characters, at most 65536" in message


async def test_fingerprint_is_the_same_for_the_same_server() -> None:
    async with gateway() as server:
        marks = {(await server.post(CHAT, messages=HI, max_tokens=1)).json()["system_fingerprint"] for _ in range(2)}
    async with gateway(fake_engine(max_model_len=128)) as server:
        marks.add((await server.post(CHAT, messages=HI, max_tokens=1)).json()["system_fingerprint"])
    assert len(marks) == 2


async def test_control_token_that_marks_a_call_is_seen() -> None:
    text = '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}'
    tokenizer = chat_tokenizer(TEMPLATE, "<|python_tag|>")
    engine = fake_engine(tokens=tuple(tokenizer.encode(text)), max_model_len=4096, vocab_size=tokenizer.vocab_size)
    async with gateway(engine, tokenizer, tool_call_parser="llama3_json") as server:
        message = (await server.post(CHAT, messages=HI, tools=TOOLS)).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert (await server.post(CHAT, messages=HI)).json()["choices"][0]["message"]["content"].startswith('{"name"')


async def test_responses_endpoint_calls_tools_and_thinks_as_well() -> None:
    engine = ScriptedEngine((), EOS, VOCAB_SIZE, max_model_len=4096, scripts=SCRIPTS)
    async with gateway(engine, reasoning_parser="qwen3") as server:
        function = {"type": "function", **TOOLS[0]["function"]}
        answer = (await server.post("/v1/responses", input="[thinking and tools]", tools=[function])).json()
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "function_call"]
    assert answer["output"][1]["arguments"] == '{"city": "Paris"}'
