"""Embeddings, scores and reranking on the wire: every API's shapes, refusals by field, and requests that are left."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest

from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import Unavailable
from allspan.protos.embeddings.card import EmbeddingCard
from allspan.protos.embeddings.rerank import QWEN3
from support.gateway import Gateway, eventually, fake_engine, gateway, stub

PLAIN = EmbeddingCard(normalize=False, size=2)
MATRYOSHKA = replace(PLAIN, is_matryoshka=True, normalize=True, prompts={"query": "?"})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the model's files say."""

    def use(card: EmbeddingCard) -> None:
        monkeypatch.setattr("allspan.client.gateway.served_model.embedding_card", lambda path, name: card)

    use(PLAIN)
    return use


async def vectors(server: Gateway, **body: Any) -> Any:
    answer = await server.post("/v1/embeddings", **body)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


async def test_every_kind_of_input_gives_its_vectors_in_order(card: Any) -> None:
    """A vector of the fake engine is the prompt's length and its first id."""
    async with gateway() as server:
        assert await vectors(server, input="Hi") == [[2, 72]]
        assert await vectors(server, input=["Hi", "you"]) == [[2, 72], [3, 121]]
        assert await vectors(server, input=[72, 105]) == [[2, 72]]
        assert await vectors(server, input=[[72, 105], [121]], user="me", model="tiny") == [[2, 72], [1, 121]]
        assert await vectors(server, input="Hi", normalize=True) == [
            [pytest.approx(2 / 5188**0.5), pytest.approx(1, abs=1e-3)]
        ]
        assert await vectors(server, input="Hello", truncate_prompt_tokens=2) == [[2, ord("l")]]
        many = await vectors(server, input=[[i % 200 + 1] for i in range(600)])
        assert [each[1] for each in many] == [i % 200 + 1 for i in range(600)]
        (coded,) = await vectors(server, input="Hi", encoding_format="base64")
        assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == [2, 72]
        body = (await server.post("/v1/embeddings", input=["Hi", "you"], priority=3)).json()
        assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        assert (body["object"], body["model"], body["data"][1]["index"]) == ("list", "tiny", 1)
        asked = server.engine.last
        assert (asked.options.pooling, asked.options.priority) == ("last", 3)


async def test_openais_client_reads_them(card: Any) -> None:
    card(MATRYOSHKA)
    async with gateway() as server:
        client = openai.AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="none")
        made = await client.embeddings.create(model="tiny", input=["Hi", "you"], dimensions=1)
        assert [each.embedding for each in made.data] == [[1.0], [1.0]]
        assert made.usage.total_tokens == 5
        await client.close()
        assert len(await vectors(server, input="Hi", input_type="query")) == 1
        assert server.engine.last.prompt == tuple(b"?Hi")


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {}, "input", "input is missing"),
    ("/v1/embeddings", {"input": []}, "input", "input is an empty list"),
    ("/v1/embeddings", {"input": ""}, "input", "input is empty"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input", "input[1] is 1"),
    ("/v1/embeddings", {"input": ["a", "b" * 300]}, "input[1]", "input[1] has 300 tokens, at most 255"),
    ("/v1/embeddings", {"input": [1, 99999]}, "input", "input[1] is token id 99999"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "input holds 2049 inputs, at most 2048"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1}, "dimensions", "dimensions is 1, but the model does not say"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64"),
    ("/v1/embeddings", {"input": "a", "input_type": "x"}, "input_type", "must be one of the model's prompts (none)"),
    ("/v1/embeddings", {"input": "a", "timeout_s": 0}, "timeout_s", "timeout_s is 0"),
    ("/v1/rerank", {"query": "a"}, "documents", "documents is None"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n is 0, must be at least 1"),
    ("/v1/rerank", {"query": "a", "documents": ["b", 1]}, "documents", "documents[1] is 1, must be text"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "queries", "queries has 2 entries for 1 documents"),
    ("/v1/score", {"queries": "a", "documents": "b", "instruction": "c"}, "instruction", "is no reranker"),
]


async def test_what_does_not_fit_is_refused_by_its_field(card: Any) -> None:
    async with gateway() as server:
        for path, body, field, words in REFUSED:
            answer = await server.post(path, **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), answer.text
            assert words in error["message"]
        assert not server.engine.asked
    async with gateway(api_key=("sk-right-key",)) as server:
        assert (await server.post("/v1/embeddings", input="a")).status_code == 401


async def test_a_model_for_embeddings_alone_refuses_completions_by_its_name(card: Any) -> None:
    card(replace(PLAIN, generates=False))
    async with gateway() as server:
        for path, body in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = await server.post(f"/v1/{path}", **body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("model 'tiny' makes embeddings and generates no text")
        models = (await server.http.get("/v1/models")).json()
        assert models["data"][0]["capabilities"] == ["embedding"]


async def test_ollamas_and_llama_servers_shapes(card: Any) -> None:
    async with gateway() as server:
        made = (await server.post("/api/embed", model="tiny", input=["Hi", "you"])).json()
        assert [round(sum(x * x for x in each), 5) for each in made["embeddings"]] == [1, 1]
        assert (made["model"], made["prompt_eval_count"]) == ("tiny", 5)
        assert (await server.post("/api/embeddings", model="tiny", prompt="Hi")).json() == {"embedding": [2, 72]}
        for path in ("/embedding", "/embeddings"):
            made = (await server.post(path, content="Hi", embd_normalize=-1)).json()
            assert made == [{"index": 0, "embedding": [[2, 72]]}]


async def test_documents_are_compared_with_a_query_where_the_model_is_no_reranker(card: Any) -> None:
    async with gateway() as server:
        body = {"query": "b", "documents": ["zzzzzzzzzzzzzzzzzzzz", {"text": "b"}, "bbbbb"]}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            made = (await server.post(path, **body, top_n=2)).json()
            assert [each["index"] for each in made["results"]] == [1, 2]
            assert made["results"][0]["document"] == {"text": "b"}
            assert made["results"][0]["relevance_score"] == pytest.approx(1)
        made = (await server.post("/rerank", **body, return_documents=False)).json()
        assert made["results"][0].keys() == {"index", "relevance_score"}
        for names in (("text_1", "text_2"), ("queries", "documents")):
            made = (await server.post("/v1/score", **dict(zip(names, ("b", ["b", "bbbbb"]), strict=True)))).json()
            assert [each["object"] for each in made["data"]] == ["score", "score"]
            assert made["data"][0]["score"] == pytest.approx(1)


async def test_a_reranker_is_asked_by_its_prompt_and_the_operators_template(card: Any, tmp_path: Path) -> None:
    card(replace(PLAIN, head=QWEN3))
    file = tmp_path / "template.txt"
    file.write_text("{instruction}|{query}|{document}?")
    async with gateway(rerank_template=str(file), engine=fake_engine(max_model_len=2048)) as server:
        made = (await server.post("/v1/rerank", query="q", documents=["a", "bb"], instruction="i")).json()
        assert server.engine.last.options.pooling == "score"
        assert {asked.prompt for asked in server.engine.asked.values()} == {tuple(b"i|q|a?"), tuple(b"i|q|bb?")}
        # The fake engine's logits differ by the prompt's length.
        assert [each["index"] for each in made["results"]] == [1, 0]
        assert made["results"][1]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-6.0)))
        assert (await server.http.get("/v1/models")).json()["data"][0]["capabilities"][-1] == "rerank"


async def test_a_caller_that_leaves_ends_its_requests_and_a_failure_is_the_answer(card: Any) -> None:
    async with gateway(fake_engine(endless=True)) as server:
        call = asyncio.create_task(server.post("/v1/embeddings", input=["a"] * 5))
        await eventually(lambda: len(server.engine.running) == 5)
        call.cancel()
        await eventually(lambda: not server.engine.running)
        assert all(asked.stopped for asked in server.engine.asked.values())
    async with gateway(fake_engine(fail_after=0, failure=Unavailable("rank 1 died"))) as server:
        answer = await server.post("/v1/embeddings", input=["a"] * 5)
        assert (answer.status_code, "rank 1 died" in answer.text) == (503, True)
        assert not server.engine.running


async def test_grpc_gives_the_same(card: Any) -> None:
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        service = stub(channel)
        made = await service.Embed(pb.EmbedRequest(texts=["Hi", "you"]), timeout=10)
        assert [list(each.values) for each in made.embeddings] == [[2, 72], [3, 121]]
        assert made.prompt_tokens == 5
        made = await service.Embed(pb.EmbedRequest(token_ids=[pb.TokenIds(ids=[9])]), timeout=10)
        assert list(made.embeddings[0].values) == [1, 9]
        assert server.engine.last.options.timeout_s == pytest.approx(10, abs=1)
        scored = await service.Score(pb.ScoreRequest(queries=["b"], documents=["b", "zzz"]), timeout=10)
        assert scored.scores[0] == pytest.approx(1)
        for method, request, words in (
            (service.Embed, pb.EmbedRequest(), "texts and token_ids: one of them must be given"),
            (service.Embed, pb.EmbedRequest(texts=["a"], dimensions=1), "dimensions is 1"),
            (service.Score, pb.ScoreRequest(queries=["a"]), "documents is empty"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await method(request, timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
