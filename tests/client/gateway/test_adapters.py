"""The model field of every API may be an adapter's name: it picks that adapter, and answers and lists say so."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from allspan.protos import inference_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import (
    AdapterLoaded,
    AllspanError,
    ConfigError,
    InvalidRequest,
    PermissionDenied,
    TooManyAdapters,
)
from support.gateway import events, fake_engine, front, gateway, stub

ADAPTERS = (AdapterModule("sql", "/adapters/sql-lora"), AdapterModule("Law", "/b", "org/base"))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}

CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/api/chat": {"messages": CHAT["messages"], "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/completion": {"prompt": "Hi", "n_predict": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "you"},
    "/v1/rerank": {"query": "Hi", "documents": ["you"]},
}
"""A request for each endpoint that runs the model and answers with its name."""


async def test_a_request_takes_the_adapter_that_it_names_as_its_model() -> None:
    async with gateway(fake_engine(adapters=ADAPTERS)) as server:
        for path, body in CALLS.items():
            for model, adapter in (("sql", "sql"), ("Law", "Law"), ("tiny", "")):
                answer = await server.post(path, model=model, **body)
                assert answer.status_code == 200, (path, answer.text)
                assert (path, server.engine.last.options.adapter) == (path, adapter)
                assert (path, answer.json()["model"]) == (path, model)
        for path in ("/embedding", "/api/embeddings"):  # their answers have no name
            await server.post(path, model="law:latest", content="Hi", prompt="Hi")
            assert server.engine.last.options.adapter == "Law"
        await server.post("/v1/completions", prompt="Hi", max_tokens=1)
        assert server.engine.last.options.adapter == ""


async def test_each_chunk_of_a_stream_has_the_adapters_name() -> None:
    async with gateway(fake_engine(adapters=ADAPTERS)) as server:
        answer = await server.post("/v1/chat/completions", model="sql", stream=True, **CHAT)
        assert {chunk["model"] for chunk in events(answer.text)[:-1]} == {"sql"}


async def test_an_unknown_name_is_not_found_and_never_the_model() -> None:
    async with gateway(fake_engine(adapters=ADAPTERS)) as server:
        for path, body in CALLS.items():
            answer = await server.post(path, model="org/sql", **body)
            assert (path, answer.status_code) == (path, 404)
            assert "has 'tiny' and 'sql' and 'Law'" in answer.text
        assert not server.engine.asked


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [("/completion", "lora", [{"id": 0, "scale": 1.0}]), ("/v1/completions", "lora_path", "sql")],
)
async def test_other_servers_fields_for_an_adapter_are_refused(path: str, field: str, value: object) -> None:
    async with gateway(fake_engine(adapters=ADAPTERS)) as server:
        answer = await server.post(path, prompt="Hi", **{field: value})
        assert (answer.status_code, "give the adapter's name as the model" in answer.text) == (400, True)
        assert (await server.post("/completion", prompt="Hi", n_predict=1, lora=[])).status_code == 200


async def test_lists_of_models_have_the_adapters_with_their_parent() -> None:
    async with gateway(fake_engine(adapters=ADAPTERS)) as server:
        data = (await server.http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["root"], each["parent"]) for each in data] == [
            ("tiny", "tiny", None),
            ("sql", "sql-lora", "tiny"),
            ("Law", "b", "org/base"),
        ]
        assert (await server.http.get("/v1/models/LAW")).json() == data[2]
        assert (await server.http.get("/v1/models/none")).status_code == 404
        tags = (await server.http.get("/api/tags")).json()["models"]
        parents = [(each["name"], each["details"]["parent_model"]) for each in tags]
        assert parents == [("tiny:latest", ""), ("sql:latest", "tiny"), ("Law:latest", "tiny")]
        assert len({each["digest"] for each in tags}) == 3
        shown = (await server.post("/api/show", model="sql:latest")).json()
        assert shown["details"]["parent_model"] == "tiny"


async def test_over_grpc_the_model_may_be_an_adapter() -> None:
    async with (
        gateway(fake_engine(adapters=ADAPTERS)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        calls = stub(channel)
        told = [(each.id, each.parent) for each in (await calls.ListModels(pb.ListModelsRequest())).models]
        assert told == [("tiny", ""), ("sql", "tiny"), ("Law", "org/base")]
        async for _ in calls.Generate(pb.GenerateRequest(model="sql", text="Hi", timeout_s=60), timeout=30):
            pass
        options = server.engine.last.options
        assert (options.adapter, 0 < (options.timeout_s or 0) < 60) == ("sql", True)
        embedded = await calls.Embed(pb.EmbedRequest(model="Law", texts=["Hi"]))
        assert (embedded.model, server.engine.last.options.adapter) == ("Law", "Law")
        scored = await calls.Score(pb.ScoreRequest(model="sql", queries=["Hi"], documents=["you"]))
        assert (scored.model, server.engine.last.options.adapter) == ("sql", "sql")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in calls.Generate(pb.GenerateRequest(model="nosuch", text="Hi")):
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_log_lines_and_the_lora_metric_name_the_adapter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with gateway(fake_engine(adapters=ADAPTERS, step_s=0.002, endless=True)) as server:
        body = {"model": "sql", "prompt": "Hi", "max_tokens": 200, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            while '"text"' not in await anext(lines):
                pass
            found = (await server.http.get("/metrics")).text
    assert 'max_lora="4"' in found
    assert 'running_lora_adapters="sql",waiting_lora_adapters=""' in found
    assert ", model sql, request id" in caplog.text


def test_an_adapter_that_is_called_as_the_server_calls_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="names an adapter 'sql', which is the model's own name"):
        front(fake_engine(adapters=ADAPTERS), served_model_name=("mine", "org/SQL"))


KEY, ADMIN = "sk-user-0123456789abcdef", {"Authorization": "Bearer sk-admin-0123456789abcdef"}


def managed(**script: Any) -> Any:
    engine = fake_engine(adapters=ADAPTERS, lora_dir="/adapters", **script)
    return gateway(engine, api_key=(KEY,), admin_api_key=ADMIN["Authorization"].removeprefix("Bearer "))


async def test_vllms_calls_load_and_unload_adapters_that_requests_may_name_at_once() -> None:
    async with managed() as server:
        user = {"Authorization": f"Bearer {KEY}"}
        asked = {"model": "new", "prompt": "Hi", "max_tokens": 2}
        assert (await server.http.post("/v1/completions", json=asked, headers=user)).status_code == 404
        body = {"lora_name": "new", "lora_path": "/adapters/new-1", "base_model_name": "org/base"}
        answer = await server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
        assert (await server.http.post("/v1/completions", json=asked, headers=user)).json()["model"] == "new"
        data = (await server.http.get("/v1/models", headers=user)).json()["data"]
        assert [(each["id"], each["root"], each["parent"]) for each in data][-1] == ("new", "new-1", "org/base")
        described = (await server.http.get("/openapi.json", headers=user)).json()["components"]["schemas"]
        assert described["CompletionRequest"]["properties"]["model"]["enum"][-1] == "new"
        answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "new"}, headers=ADMIN)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
        assert (await server.http.post("/v1/completions", json=asked, headers=user)).status_code == 404
        assert server.engine.controls == [("load new from /adapters/new-1", 0.0), ("unload new", 0.0)]


async def test_an_adapter_with_running_requests_says_so_when_it_is_unloaded() -> None:
    async with managed(step_s=0.002, endless=True) as server:
        user, body = (
            {"Authorization": f"Bearer {KEY}"},
            {"model": "sql", "prompt": "Hi", "max_tokens": 200, "stream": True},
        )
        async with server.http.stream("POST", "/v1/completions", json=body, headers=user) as stream:
            lines = stream.aiter_lines()
            while '"text"' not in await anext(lines):
                pass
            answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=ADMIN)
    assert answer.text.endswith("Its place is free when the 1 requests that still have it have ended.")


async def test_sglangs_calls_answer_with_what_is_loaded() -> None:
    async with managed() as server:
        body = {"lora_name": "new", "lora_path": "new-1"}
        answer = (await server.http.post("/load_lora_adapter", json=body, headers=ADMIN)).json()
        assert (answer["success"], answer["loaded_adapters"]["new"]) == (True, "new-1")
        answer = (await server.http.post("/unload_lora_adapter", json={"lora_name": "sql"}, headers=ADMIN)).json()
        assert list(answer["loaded_adapters"]) == ["Law", "new"]


@pytest.mark.parametrize(
    ("body", "failure", "status", "words"),
    [
        ({"lora_name": "new"}, None, 400, "lora_path"),
        ({"lora_name": "a/b", "lora_path": "x"}, None, 400, "a name must have letters"),
        ({"lora_name": "tiny", "lora_path": "x"}, None, 400, "the model's own name"),
        ({"lora_name": "new", "lora_path": ""}, None, 400, "lora_path is empty"),
        ({"lora_name": "sql", "lora_path": "x"}, AdapterLoaded("'sql' is loaded"), 400, "'sql' is loaded"),
        ({"lora_name": "new", "lora_path": "x"}, TooManyAdapters("2 adapters are loaded"), 409, "2 adapters"),
        ({"lora_name": "new", "lora_path": "/etc"}, PermissionDenied("lies outside"), 403, "lies outside"),
        ({"lora_name": "new", "lora_path": "x"}, InvalidRequest("rank 1: no", "lora_path"), 400, "rank 1: no"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_with_its_status(
    body: dict[str, Any], failure: AllspanError | None, status: int, words: str
) -> None:
    async with managed(adapter_failure=failure) as server:
        answer = await server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


async def test_adapters_are_loaded_with_the_admin_key_and_a_folder_for_them_alone() -> None:
    body = {"lora_name": "new", "lora_path": "x"}
    async with managed() as server:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
            answer = await server.http.post(path, json=body, headers={"Authorization": f"Bearer {KEY}"})
            assert (answer.status_code, "needs the admin key" in answer.text) == (403, True)
        assert not server.engine.controls
        server.engine.lora_dir = ""
        answer = await server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert (answer.status_code, "start the server with --lora-dir DIR" in answer.text) == (403, True)
        assert not server.engine.controls


async def test_grpc_loads_unloads_and_lists_adapters() -> None:
    async with managed() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        calls = stub(channel)
        admin, user = ((("authorization", key),) for key in (ADMIN["Authorization"], f"Bearer {KEY}"))
        await calls.LoadLora(pb.LoadLoraRequest(lora_name="new", lora_path="/adapters/n"), metadata=admin)
        told = (await calls.ListLoras(pb.ListLorasRequest(), metadata=user)).loras
        assert [(each.name, each.parent, each.root) for each in told] == [
            ("sql", "tiny", "sql-lora"),
            ("Law", "org/base", "b"),
            ("new", "tiny", "n"),
        ]
        reply = await calls.UnloadLora(pb.UnloadLoraRequest(lora_name="new"), metadata=admin)
        assert reply.running == 0
        for call, message in ((calls.LoadLora, pb.LoadLoraRequest()), (calls.UnloadLora, pb.UnloadLoraRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, metadata=user)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
