"""The older endpoint's own: the prompt's log-probabilities (`echo`), the best of several, and what is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI

from allspan.protos.api.results import Output, TokenLogprob
from support.chat_tokenizer import EOS
from support.fake_engine import ANSWER, Asked, FakeEngine
from support.gateway import Gateway, events, fake_engine, gateway


async def completion(server: Gateway, **body: Any) -> Any:
    response = await server.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_echo_alone_puts_the_prompt_before_the_output() -> None:
    async with gateway() as server:
        text = await completion(server, prompt="Hi! ", max_tokens=3, echo=True)
        ids = await completion(server, prompt=[[72, 105], [72]], max_tokens=3, echo=True, n=2)
        nothing = await completion(server, prompt="Hi", max_tokens=0, echo=True)
        refused = await server.post("/v1/completions", prompt="Hi", max_tokens=0)
    assert text["choices"][0]["text"] == "Hi! The"
    assert [choice["text"] for choice in ids["choices"]] == ["HiThe", "HiThe", "HThe", "HThe"]
    assert text["choices"][0]["logprobs"] is None
    assert (nothing["choices"][0]["text"], nothing["choices"][0]["finish_reason"]) == ("Hi", "length")
    assert nothing["usage"]["completion_tokens"] == 0
    assert refused.status_code == 400


@pytest.mark.parametrize(("max_tokens", "output"), [(0, ""), (2, "Th")])
async def test_echo_with_logprobs_scores_the_prompt(max_tokens: int, output: str) -> None:
    """As evaluation harnesses read it: a place a token, null for the first, offsets into the text."""
    async with gateway() as server:
        answer = await completion(server, prompt="añb", max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "añb" + output
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b", *output]
    prompt = [None, -19.5, -17.7, -9.8]
    assert logprobs["token_logprobs"] == pytest.approx([*prompt, *[-0.5] * max_tokens])
    first, second, *_ = logprobs["top_logprobs"]
    assert (first, second) == (None, {"\ufffd": 0.0})
    assert logprobs["text_offset"] == [0, 1, 1, 2, *range(3, 3 + max_tokens)]
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 4,
        "completion_tokens": max_tokens,
        "total_tokens": 4 + max_tokens,
        "prompt_tokens_details": None,
    }


async def test_streams_echo_before_the_first_token_of_every_choice() -> None:
    body: dict[str, Any] = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 0}
    async with gateway() as server:
        streamed = events((await server.post("/v1/completions", stream=True, **body)).text)
        whole = await completion(server, **body)
        plain = events((await server.post("/v1/completions", prompt="ab", echo=True, stream=True)).text)
    assert streamed.pop() == "[DONE]"
    for choice in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for field, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][field]] == values
        assert pieces[0]["text"] in ("ab", "c")
        assert pieces[0]["finish_reason"] is None
    assert "".join(chunk["choices"][0]["text"] for chunk in plain[:-1]) == "ab" + ANSWER[:16]


async def test_echo_and_prompt_logprobs_give_each_as_many_as_asked() -> None:
    async with gateway() as server:
        answer = await completion(server, prompt="ab", max_tokens=1, echo=True, logprobs=0, prompt_logprobs=2)
    (choice,) = answer["choices"]
    assert len(choice["prompt_logprobs"][1]) == 2
    assert choice["logprobs"]["top_logprobs"][1] == {"b": pytest.approx(-9.8)}


class Uneven(FakeEngine):
    """The later a request comes, the likelier are its tokens."""

    def _step(self, asked: Asked) -> Output:
        place = list(self.asked.values()).index(asked)
        output = super()._step(asked)
        ids = tuple(97 + place if token != EOS else token for token in output.token_ids)
        return replace(output, token_ids=ids, logprobs=tuple(TokenLogprob(-5.0 + place) for _ in output.logprobs))


async def test_best_of_returns_the_likeliest_of_each_prompt() -> None:
    engine = Uneven(**vars(fake_engine()))
    async with gateway(engine) as server, AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="none") as client:
        answer = await client.completions.create(
            model="tiny", prompt=["x", "y"], best_of=3, n=2, max_tokens=4, seed=5, extra_body={"top_k": 3}
        )
        seeds = [asked.params.seed for asked in engine.asked.values()]
        assert all(asked.params.logprobs == 0 for asked in engine.asked.values())
    assert [choice.text for choice in answer.choices] == ["cccc", "bbbb", "ffff", "eeee"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6 * 4)
    assert seeds == [5, 6, 7] * 2


async def test_what_becomes_text_can_be_chosen() -> None:
    special = fake_engine(tokens=(*b"ab", 258, *b"END."))
    async with gateway(special) as server:
        plain = await completion(server, prompt="x", stop="END")
        kept = await completion(server, prompt="x", stop="END", include_stop_str_in_output=True)
        shown = await completion(
            server,
            prompt="x",
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            spaces_between_special_tokens=True,
        )
        ids = await completion(server, prompt="x", detokenize=False, return_token_ids=True, max_tokens=3)
        named = await completion(server, prompt="x", logprobs=1, return_tokens_as_token_ids=True, max_tokens=1)
    texts = [answer["choices"][0]["text"] for answer in (plain, kept, shown, ids)]
    assert texts == ["ab", "abEND", "ab<|user|>END.</s>", ""]
    assert (ids["choices"][0]["prompt_token_ids"], ids["choices"][0]["token_ids"]) == ([120], [97, 98, 258])
    assert named["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:97": -0.5}]


async def test_token_ids_are_streamed_the_prompts_first() -> None:
    async with gateway() as server:
        body = {"prompt": "xy", "return_token_ids": True, "max_tokens": 2, "stream": True, "detokenize": False}
        streamed = events((await server.post("/v1/completions", **body)).text)
    pieces = [chunk["choices"][0] for chunk in streamed[:-1]]
    assert pieces[0]["prompt_token_ids"] == [120, 121]
    assert [token for piece in pieces for token in piece["token_ids"]] == list(b"Th")


async def test_prompts_can_be_cut_at_their_beginning_and_read_bare() -> None:
    async with gateway() as server:
        await completion(server, prompt="abcdef", truncate_prompt_tokens=2, max_tokens=1)
        assert server.engine.last.prompt == tuple(b"ef")
        await completion(server, prompt="a" * 300, truncate_prompt_tokens=-1, max_tokens=10)
        assert len(server.engine.last.prompt) == 256 - 10
        cut = await completion(server, prompt="abc", truncate_prompt_tokens=1, max_tokens=0, echo=True)
        assert cut["choices"][0]["text"] == "c"
        messages = [{"role": "user", "content": "a" * 300}]
        body = {"messages": messages, "truncate_prompt_tokens": 3, "max_tokens": 1}
        assert (await server.post("/v1/chat/completions", **body)).status_code == 200
        assert server.engine.last.prompt == (97, 97, 259)


async def test_a_server_may_allow_less() -> None:
    limits = {"max_n": 2, "max_best_of": 3, "max_stop_sequences": 1, "max_logprobs": 4, "max_prompts": 2}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 3}, "n is 3, must be from 1 to 2"),
        ({"best_of": 4}, "best_of is 4, must be from n (1) to 3"),
        ({"stop": ["a", "b"]}, "stop has 2 entries, at most 1"),
        ({"logprobs": 5}, "logprobs is 5, must be from 0 to 4"),
        ({"prompt_logprobs": 5}, "prompt_logprobs is 5, must be from 0 to 4"),
        ({"prompt": ["a", "b", "c"]}, "prompt holds 3 prompts, at most 2"),
    ]
    async with gateway(**limits) as server:
        for body, words in refused:
            response = await server.post("/v1/completions", **({"prompt": "x"} | body))
            assert (response.status_code, words in response.text) == (400, True), response.text
        await completion(server, prompt=["a", "b"], n=2, best_of=3, stop="a", logprobs=4)
