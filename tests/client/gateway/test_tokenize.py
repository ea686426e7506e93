"""What a prompt's tokens are, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from support.gateway import fake_engine, gateway


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with gateway() as server:
        answer = (await server.post("/tokenize", model="tiny", prompt="Hé<|user|>", return_token_strs=True)).json()
        back = (await server.post("/detokenize", model="tiny", tokens=answer["tokens"])).json()
        bare = (await server.post("/detokenize", tokens=answer["tokens"], skip_special_tokens=True)).json()
        long = (await server.post("/tokenize", prompt="a" * 60_000, return_token_strs=True)).json()
        again = (await server.post("/detokenize", tokens=long["tokens"])).json()
        empty = (await server.post("/tokenize", prompt="")).json()
    assert answer == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [72, 195, 169, 258],
        "token_strs": ["H", "\ufffd", "\ufffd", "<|user|>"],
    }
    assert (back, bare) == ({"prompt": "Hé<|user|>"}, {"prompt": "Hé"})
    assert long["count"] == len(long["token_strs"]) == 60_000
    assert again == {"prompt": "a" * 60_000}
    assert empty == {"count": 0, "max_model_len": 256, "tokens": [], "token_strs": None}


async def test_conversations_are_counted_through_the_template() -> None:
    messages = [{"role": "user", "content": "x"}]
    async with gateway() as server:
        whole = (await server.post("/tokenize", messages=messages)).json()
        open_ended = (await server.post("/tokenize", messages=messages, add_generation_prompt=False)).json()
        await server.post("/v1/chat/completions", messages=messages, max_tokens=1)
        asked = list(server.engine.last.prompt)
    assert whole["tokens"] == asked == [258, 120, 259]
    assert open_ended["tokens"] == [258, 120]


async def test_a_conversation_with_tools_is_counted_as_it_would_run() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    async with gateway(fake_engine(max_model_len=4096)) as server:
        counted = (await server.post("/tokenize", **body)).json()
        assert (await server.post("/v1/chat/completions", max_tokens=1, **body)).status_code == 200
        assert counted["tokens"] == list(server.engine.last.prompt)
        assert counted["count"] > 100


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "neither is given"),
    ("/tokenize", {"prompt": "x", "messages": []}, "both are given"),
    ("/tokenize", {"prompt": 7}, "prompt is 7"),
    ("/tokenize", {"prompt": "x" * 70_000}, "70000 characters, at most 65536"),
    ("/tokenize", {"prompt": "x", "add_special_token": 1}, "did you mean add_special_tokens?"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content is None"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1, 261]}, "tokens[1] is token id 261, must be from 0 to 260"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1] is token id -1"),
    ("/detokenize", {"tokens": [True]}, "tokens[0] is True"),
    ("/detokenize", {"tokens": [1] * 70_000}, "70000 entries, at most 65536"),
]


async def test_what_does_not_fit_is_refused_by_name() -> None:
    async with gateway() as server:
        for path, body, words in REFUSED:
            response = await server.post(path, **body)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), body
            assert words in response.json()["error"]["message"]


async def test_another_model_is_not_known() -> None:
    async with gateway() as server:
        assert (await server.post("/tokenize", prompt="x", model="other")).status_code == 404
        assert (await server.post("/detokenize", tokens=[1], model="other")).status_code == 404


async def test_a_client_that_counts_by_itself_learns_what_it_must_know() -> None:
    async with gateway() as server:
        info = (await server.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["add_bos_token"]) == ("<s>", "</s>", False)
    assert info["vocab_size"] == 261
    assert "<|assistant|>" in info["chat_template"]
