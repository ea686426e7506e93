"""llama-server's /completion, /props and /slots, as its clients use them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.chat_tokenizer import EOS, VOCAB_SIZE
from support.gateway import Gateway, events, gateway
from support.openai_scenarios import SCRIPTS
from support.scripted_engine import ScriptedEngine

TEXT = "Hello wörld, bye."


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Gateway]:
    engine = ScriptedEngine((), EOS, VOCAB_SIZE, max_model_len=4096, scripts=SCRIPTS)
    async with gateway(engine, **settings) as server:
        yield server


async def test_a_completion_whole_and_streamed() -> None:
    async with served() as server:
        whole = (await server.post("/completion", prompt="[plain]", n_predict=-1, return_tokens=True)).json()
        assert (whole["content"], whole["stop"], whole["stop_type"]) == (TEXT, True, "eos")
        assert bytes(whole["tokens"][:-1]).decode() == TEXT
        assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (7, 19)
        timings = whole["timings"]
        assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (5, 2, 19)
        assert timings["predicted_per_second"] > 0
        text = (await server.post("/completion", prompt=list(b"[plain]"), stream=True)).text
        parts = events(text)
        assert "".join(part["content"] for part in parts) == TEXT
        assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1]["timings"].keys() == timings.keys()
        stopped = (await server.post("/completion", prompt="[plain]", stop=[", b"])).json()
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", ", b")
        cut = (await server.post("/completion", prompt="[plain]", n_predict=3)).json()
        assert (cut["content"], cut["stop_type"]) == ("Hel", "limit")
        read = (await server.post("/completion", prompt="[plain]", n_predict=0)).json()
        assert (read["content"], read["tokens_evaluated"]) == ("", 7)
        for asked in ({"max_tokens": 3}, {"max_tokens": 9, "n_predict": 3}):
            assert (await server.post("/completion", prompt="[plain]", **asked)).json()["content"] == "Hel"
        assert (await server.post("/completion", prompt="[plain]", max_tokens=0)).json()["content"] == ""
        raw = await server.http.post("/completion", content=json.dumps({"prompt": "[plain]"}))  # as curl does
        assert raw.json()["content"] == TEXT


async def test_fields_reach_the_sampler_under_their_names() -> None:
    body = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "repeat_penalty": 1.5}
    body |= {"seed": -1, "logit_bias": [[4, -2.5], [6, False]], "cache_prompt": False, "ignore_eos": True, "n_probs": 2}
    habits = {"mirostat": 0, "samplers": ["top_k"], "id_slot": -1, "dry_multiplier": 0.0, "xtc_probability": 0.1}
    async with served(strict=True) as server:
        answer = (
            await server.post("/completion", prompt="[json]", **body, **habits, json_schema={"type": "object"})
        ).json()
        asked = server.engine.last
        grammar = (await server.post("/completion", prompt="[json]", grammar='root ::= "a" | "b"')).status_code
        props = (await server.http.get("/props")).json()
        slots = (await server.http.get("/slots")).json()
    params = asked.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (0.5, 7, 0.9, 0.1, 0.8)
    assert (params.repetition_penalty, params.seed, params.ignore_eos) == (1.5, None, True)
    assert params.logit_bias == ((4, -2.5), (6, -100.0))
    assert params.grammar is not None
    assert (params.grammar.kind, asked.options.prefix_cache) == ("json_schema", False)
    assert len(answer["completion_probabilities"][0]["top_logprobs"]) == 2
    assert answer["generation_settings"]["repeat_penalty"] == 1.5
    assert grammar == 200
    assert (props["default_generation_settings"]["n_ctx"], props["eos_token"]) == (4096, "</s>")
    assert slots == [
        {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": False, "next_token": {"n_decoded": 0}}
    ]


async def test_what_does_not_fit_is_refused_by_name() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ["a", "b"]}, "/v1/completions takes several"),
        ({"prompt": None}, "prompt is missing"),
        ({"repeat_penalty": -1}, "repeat_penalty is -1"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"logit_bias": 7}, "logit_bias is 7, must be a list of [token id, bias]"),
        ({"max_tokens": "50"}, "max_tokens is '50'"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"n_predic": 7}, "did you mean n_predict?"),
        ({"image_data": [1], "stopp": "x"}, "did you mean stop?"),
    ]
    async with served() as server:
        for body, words in refused:
            answer = await server.post("/completion", **({"prompt": "[plain]"} | body))
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
        down = await server.post("/completion", prompt="[down]")
        assert (down.status_code, "rank 1" in down.text) == (503, True)
        assert (
            "rank 1"
            in events((await server.post("/completion", prompt="[breaks off]", stream=True)).text)[-1]["error"][
                "message"
            ]
        )


async def test_tokens_of_a_content() -> None:
    async with served() as server:
        assert (await server.post("/tokenize", content="Hé")).json()["tokens"] == list("Hé".encode())
        assert (await server.http.get("/health")).json() == {"status": "ok"}
