"""What is wrong is refused with OpenAI's body naming field, value and limit; the next request works."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.gateway import Gateway, fake_engine, gateway

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 2**31}, "n", "1 to 8"),
    ({"n": 0}, "n", "1 to 8"),
    ({"best_of": 10**6}, "best_of", "is 1000000, must be from n (1) to 8"),
    ({"best_of": 2, "n": 3}, "best_of", "must be from n (3) to 8"),
    ({"best_of": 2, "stream": True}, "best_of", "needs stream to be false"),
    ({"max_tokens": 0}, "max_tokens", "is 0, must be from 1"),
    ({"max_tokens": -1}, "max_tokens", "is -1"),
    ({"max_tokens": 2**63}, "max_tokens", "9223372036854775808"),
    ({"max_tokens": 256}, "max_tokens", "256 after a prompt of 1 tokens, at most 255"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "7"}, "max_tokens", "'7'"),
    ({"max_tokens": True}, "max_tokens", "True"),
    ({"temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"temperature": 1e30}, "temperature", "from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.1}, "top_p", "from 0 to 1"),
    ({"top_k": -7}, "top_k", "-7"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"seed": 2**65}, "seed", "must be from"),
    ({"seed": -(2**65)}, "seed", "must be from"),
    ({"min_tokens": 20}, "min_tokens", "at most max_tokens"),
    ({"logprobs": 10**6}, "logprobs", "from 0 to 20"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": ["a", ""]}, "stop", "non-empty"),
    ({"stop": ["a"] * 10_000}, "stop", "10000 entries, at most 16"),
    ({"stop": "a" * 2**20}, "stop", "1048576 characters"),
    ({"stop": 7}, "stop", "7"),
    ({"stop_token_ids": [0, -1]}, "stop_token_ids", "[1] is -1"),
    ({"stop_token_ids": [9, 10**6]}, "stop_token_ids", "[1] is 1000000"),
    ({"presence_penalty": 1e30}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "is -2.5, must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0, 2]"),
    ({"typical_p": 0}, "typical_p", "(0, 1]"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size", "is -1"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "999, must be from 0 to 260"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "'the', must be a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1', must be a token id"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "valid number"),
    ({"logit_bias": [5]}, "logit_bias", "[5]"),
    ({"allowed_token_ids": [3, 261]}, "allowed_token_ids", "[1] is 261, must be from 0 to 260"),
    ({"bad_words": ["x", " "]}, "bad_words", "[1] is ' '"),
    ({"bad_words": "x"}, "bad_words", "array"),
    ({"bad_words": ["x" * 257]}, "bad_words", "257 characters, at most 256"),
    ({"bad_words": ["x"] * 257}, "bad_words", "257 entries, at most 256"),
    ({"bad_words_ids": [[1], []]}, "bad_words_ids", "[1] is empty"),
    ({"bad_words_ids": [[1], [2, 261]]}, "bad_words_ids", "[1][1] is 261"),
    ({"stop_words_ids": [[261]]}, "stop_words_ids", "[0][0] is 261"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "needs stream to be false"),
    ({"priority": 2**31}, "priority", "must be from -2147483648 to 2147483647"),
    ({"priority": "high"}, "priority", "integer"),
    ({"timeout_s": 0}, "timeout_s", "more than 0"),
    ({"timeout_s": 1e9}, "timeout_s", "at most 86400"),
    ({"cache_salt": "x" * 257}, "cache_salt", "257 characters, at most 256"),
    ({"prefix_cache": "no"}, "prefix_cache", "boolean"),
    ({"suffix": "x"}, "suffix", "fill-in-the-middle tokens"),
    ({"use_beam_search": True}, "use_beam_search", "no beam search; best_of"),
    ({"length_penalty": 2}, "length_penalty", "no beam search; best_of"),
    ({"detokenize": False, "stop": "x"}, "detokenize", "needs stop to be empty"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0, must be -1 (as many as fit) or from 1 to 255"),
    ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens", "from 1 to 255"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "boolean"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"chat_template": "{{ ''.__class__ }}"}, "chat_template", "--chat-template"),
    ({"max_token": 5}, "max_token", "not a field that this endpoint knows: did you mean max_tokens?"),
    ({"n_predict": 5}, "n_predict", "did you mean max_tokens?"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options", "extra"),
    ({"model": 7}, "model", "string"),
]
PROMPTS: list[tuple[Any, str]] = [
    (None, "missing"),
    ("", "empty"),
    ([], "empty list"),
    ([[]], "is empty"),
    ([""], "empty"),
    ([97, 261], "prompt[1] is token id 261, must be from 0 to 260"),
    ([97, -1], "prompt[1] is token id -1"),
    ([97, True], "prompt[1] is True"),
    ([97, 1.0], "prompt[1] is 1.0"),
    ([["a"]], "prompt[0][0] is 'a'"),
    (["a", 7], "prompt[1] is 7"),
    ({"text": "a"}, "dict"),
    (["a"] * 65, "65 prompts, at most 64"),
    ("a" * 300, "300 tokens, at most 255"),
    ([97] * 256, "256 tokens, at most 255"),
    ("a" * 70_000, "70000 characters, at most 65536"),
]
MESSAGES: list[tuple[Any, str]] = [
    (None, "missing or empty"),
    ([], "missing or empty"),
    (["hi"], "messages[0] is 'hi'"),
    ([{"role": "user"}], "messages[0].content is None"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role is 'wizard'"),
    ([{"role": "user", "content": 7}], "messages[0].content is 7"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id is None, must be a string"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], "only text"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
]
BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "not valid JSON"),
    (b"{", 400, "not valid JSON"),
    (b'{"prompt": "\xff"}', 400, "not valid JSON"),
    (b'{"prompt": "\\ud800"}', 400, "not valid JSON"),
    (b"[" * 10_000, 400, "not valid JSON"),
    (b'{"prompt": ' + b"[" * 10_000, 400, "not valid JSON"),
    (b"[1]", 400, "body is [1]"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "temperature is nan"),
    (b'{"prompt": "x", "temperature": -Infinity}', 400, "temperature is -inf"),
    (b'{"prompt": "x", "top_p": 1e999}', 400, "top_p is inf"),
    (b'{"prompt": "x", "pad": "' + b"x" * 20_000 + b'"}', 413, "larger than 16384 bytes"),
]


async def check(server: Gateway, response: Any, status: int, param: str | None, words: str) -> None:
    """OpenAI's error body, in one line; and a good request goes through afterwards."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].partition("[")[0] == param
    assert (await server.post(COMPLETIONS, prompt="ok", max_tokens=1)).status_code == 200


async def test_fields_out_of_range_or_not_known_are_refused_by_name() -> None:
    async with gateway() as server:
        for body, param, words in FIELDS:
            await check(server, await server.post(COMPLETIONS, **{"prompt": "x"} | body), 400, param, words)
        assert all(asked.prompt == (111, 107) for asked in server.engine.asked.values())


async def test_chat_fields_that_do_not_fit_are_refused_by_name() -> None:
    messages = [{"role": "user", "content": "x"}]
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] is {'type': 'function'}, must be"),
        ({"response_format": {"type": "yaml"}}, "response_format", "must be one of text, json_object"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21, must be from 0 to 20"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "give one"),
        ({"max_completion_tokens": 0}, "max_tokens", "is 0"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "does not let requests set"),
    ]
    async with gateway() as server:
        for body, param, words in cases:
            await check(server, await server.post(CHAT, messages=messages, **body), 400, param, words)
        neutral: dict[str, Any] = {
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "logit_bias": {},
            "n": None,
        }
        assert (await server.post(CHAT, messages=messages, **neutral)).status_code == 200


async def test_prompts_that_do_not_fit_are_refused_with_the_place() -> None:
    async with gateway() as server:
        for prompt, words in PROMPTS:
            await check(server, await server.post(COMPLETIONS, prompt=prompt), 400, None, words)


async def test_messages_that_do_not_fit_are_refused_with_the_place() -> None:
    async with gateway() as server:
        for messages, words in MESSAGES:
            await check(server, await server.post(CHAT, messages=messages), 400, "messages", words)


async def test_bodies_that_are_no_request_are_refused() -> None:
    async with gateway(max_body_bytes=16384) as server:
        for body, status, words in BODIES:
            response = await server.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
            await check(server, response, status, None, words)


async def first_answer(server: Gateway, head: bytes, bodies: bytes) -> bytes:
    """What the server answers to a request whose body never ends; fails unless it hangs up by itself."""
    host, port = server.http_address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head + bodies)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


async def test_a_body_without_a_length_is_cut_at_the_limit() -> None:
    async with gateway(max_body_bytes=4096) as server:
        chunks = (b"400\r\n" + b" " * 1024 + b"\r\n") * 5
        answer = await first_answer(server, b"Transfer-Encoding: chunked\r\n\r\n", chunks)
        assert b" 413 " in answer.splitlines()[0]
        assert b"larger than 4096 bytes" in answer


async def test_the_sender_of_too_large_a_body_reads_why() -> None:
    """Like most clients: it sends all of the body (more than the sockets' buffers hold) before it reads."""
    async with gateway(max_body_bytes=8 << 20) as server:
        answer = await first_answer(server, b"Content-Length: 16777216\r\n\r\n", b" " * (16 << 20))
        assert b" 413 " in answer.splitlines()[0]
        assert b"larger than 8388608 bytes" in answer


async def test_a_body_that_does_not_come_times_out() -> None:
    async with gateway(body_timeout=0.1) as server:
        answer = await first_answer(server, b"Content-Length: 9\r\n\r\n", b"{")
        assert b" 408 " in answer.splitlines()[0]
        assert b"did not arrive within 0.1 s" in answer


async def test_other_content_types_paths_and_methods_get_openais_body() -> None:
    async with gateway() as server:
        text = await server.http.post(COMPLETIONS, content=b"{}", headers={"Content-Type": "text/plain"})
        await check(server, text, 415, None, "application/json")
        await check(server, await server.http.get("/v1/nothing"), 404, None, "no such endpoint")
        await check(server, await server.http.get(COMPLETIONS), 405, None, "does not take GET")
        await check(server, await server.post(COMPLETIONS, prompt="x", model="../../x"), 404, None, "not served here")


async def test_too_many_requests_are_told_to_come_back() -> None:
    async with gateway(max_concurrent_requests=3) as server:
        full = await server.post(COMPLETIONS, prompt="x", n=4)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        for _ in range(3):
            assert (await server.post(COMPLETIONS, prompt="x", n=3)).status_code == 200


async def test_a_bug_is_an_internal_error_with_an_id_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(fake_engine(refusal=ZeroDivisionError("secret"))) as server:
        response = await server.post(COMPLETIONS, prompt="x")
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert "secret" not in json.dumps(response.json())
        assert message.split()[-1] in caplog.text
        assert "ZeroDivisionError: secret" in caplog.text
        server.engine.refusal = None
        assert (await server.post(COMPLETIONS, prompt="x")).status_code == 200
