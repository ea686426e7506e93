"""The admin endpoints: for the admin key alone, everywhere, and what they do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import openai
import pytest

from allspan.client.gateway.routes import admin
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import DeadlineExceeded, Unavailable
from support.gateway import Gateway, eventually, fake_engine, front, gateway, stub

KEY, ADMIN_KEY = "sk-user-0123456789abcdef", "sk-admin-0123456789abcdef"
COMPLETIONS = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def endpoints() -> list[tuple[str, str]]:
    paths = sorted({endpoint.path for endpoint in admin.endpoints(front())})
    found = [(method, path) for path in paths for method in ("GET", "POST")]
    assert len(found) >= 20
    return found


async def operate(server: Gateway, path: str, method: str = "POST", **body: Any) -> Any:
    answer = await server.http.request(method, path, headers=bearer(ADMIN_KEY), json=body)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("settings", "headers", "status", "words"),
    [
        ({}, {}, 403, "--admin-api-key-file"),
        ({}, bearer("EMPTY"), 403, "--admin-api-key-file"),
        ({"api_key": (KEY,)}, {}, 401, "no API key"),
        ({"api_key": (KEY,)}, bearer(KEY), 403, "--admin-api-key-file"),
        ({"api_key": (KEY,), "admin_api_key": ADMIN_KEY}, {}, 401, "no API key"),
        ({"api_key": (KEY,), "admin_api_key": ADMIN_KEY}, bearer("wrong"), 401, "not known here"),
        ({"api_key": (KEY,), "admin_api_key": ADMIN_KEY}, bearer(KEY), 403, "needs the admin key"),
        ({"admin_api_key": ADMIN_KEY}, {}, 401, "no API key"),
        ({"admin_api_key": ADMIN_KEY}, bearer("EMPTY"), 401, "not known here"),
    ],
)
async def test_nobody_without_the_admin_key_does_anything(
    settings: dict[str, Any], headers: dict[str, str], status: int, words: str
) -> None:
    async with gateway(**settings) as server:
        for method, path in endpoints():
            answer = await server.http.request(method, path, headers=headers)
            if answer.status_code == 405:
                continue
            assert answer.status_code == status, (method, path)
            assert words in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == ("permission_error" if status == 403 else "invalid_request_error")
        assert server.engine.controls == []
        user = headers if "api_key" not in settings else bearer(KEY)
        assert (await server.http.get("/v1/models", headers=user)).status_code == 200


async def test_the_sdk_knows_a_refusal_of_permission() -> None:
    async with gateway(api_key=(KEY,)) as server:
        client = openai.AsyncOpenAI(base_url=server.http_address, api_key=KEY, max_retries=0)
        with pytest.raises(openai.PermissionDeniedError, match="admin key"):
            await client.post("/pause", cast_to=object)
        await client.close()


async def test_each_endpoint_asks_the_engine_for_its_operation() -> None:
    async with gateway(admin_api_key=ADMIN_KEY) as server:
        asked = server.engine.controls
        assert await operate(server, "/pause?timeout=7") == {"status": "paused"}
        assert await operate(server, "/is_paused", "GET") == {"is_paused": True}
        assert await operate(server, "/resume") == {"status": "running"}
        assert await operate(server, "/sleep?level=1&timeout=5") == {"status": "sleeping"}
        assert await operate(server, "/is_sleeping", "GET") == {"is_sleeping": True}
        assert await operate(server, "/wake_up") == {"status": "running"}
        assert await operate(server, "/is_sleeping", "GET") == {"is_sleeping": False}
        assert [name for name, _ in asked[:3]] == ["stop_model", "start_model", "stop_model"]
        assert asked[3:] == [("unload_weights", 5), ("stop_model", 60), ("reload_weights", 600), ("start_model", 0)]
        assert asked[0] == ("stop_model", 7)
        asked.clear()
        for name in ("reset_prefix_cache", "rebalance_experts", "start_profile", "stop_profile"):
            assert "status" in await operate(server, f"/{name}")
        assert [name for name, _ in asked] == [
            "reset_prefix_cache",
            "rebalance_experts",
            "start_profile",
            "stop_profile",
        ]
        assert await operate(server, "/profile", "GET") == {"what": "profile"}
        for bad in ("-1", "nan", "1e9", "x"):
            status, message = await operate(server, f"/pause?timeout={bad}")
            assert (status, "must be from 0 to 3600" in message) == (400, True)
        assert (await server.http.get("/ready")).status_code == 200


async def test_a_paused_server_is_not_ready_and_says_so_until_it_is_resumed() -> None:
    async with gateway(admin_api_key=ADMIN_KEY) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        for path, back in (("/pause", "/resume"), ("/sleep", "/wake_up")):
            await operate(server, path)
            ready = await server.http.get("/ready")
            refused = await server.post(COMPLETIONS, prompt="x")
            assert (ready.status_code, refused.status_code) == (503, 503)
            assert back in refused.json()["error"]["message"]
            call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=5)
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
            await operate(server, back)
            assert (await server.http.get("/ready")).status_code == 200
            assert (await server.post(COMPLETIONS, prompt="x")).status_code == 200


async def test_what_the_engine_refuses_is_told_and_the_server_stays_held() -> None:
    engine = fake_engine(control_failures={"stop_model": DeadlineExceeded("1 requests still run")})
    async with gateway(engine, admin_api_key=ADMIN_KEY) as server:
        assert (await operate(server, "/pause?timeout=0"))[0] == 504
        assert (await server.http.get("/ready")).status_code == 503
        engine.control_failures = {"start_model": Unavailable("the weights are unloaded; reload them first")}
        assert (await operate(server, "/resume"))[0] == 503
        assert (await server.http.get("/ready")).status_code == 503
        engine.control_failures.clear()
        await operate(server, "/resume")
        assert (await server.http.get("/ready")).status_code == 200


async def test_running_requests_are_listed_without_their_text_and_aborted_by_either_name() -> None:
    engine = fake_engine(endless=True, step_s=0.005)
    async with gateway(engine, api_key=(KEY,), admin_api_key=ADMIN_KEY) as server:

        async def ask(name: str, **more: Any) -> Any:
            headers = bearer(KEY) | {"X-Request-Id": name}
            body = {"prompt": "secret words", "max_tokens": 200} | more
            return await server.http.post(COMPLETIONS, json=body, headers=headers)

        whole, stream = asyncio.create_task(ask("one")), asyncio.create_task(ask("two", stream=True, n=2))
        await eventually(lambda: len(engine.asked) == 3 and all(asked.steps for asked in engine.asked.values()))
        listed = (await operate(server, "/admin/requests", "GET"))["requests"]
        assert sorted(row["name"] for row in listed) == ["one", "two", "two"]
        assert all(row["owner"].startswith("key-") and row["prompt_tokens"] == 12 for row in listed)
        assert "secret" not in json.dumps(listed)
        assert await operate(server, "/abort", request_id="nobody's") == {"aborted": 0}
        assert await operate(server, "/abort", request_id="one") == {"aborted": 1}
        assert await operate(server, "/abort", request_id="two") == {"aborted": 2}
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        last = (await stream).text.rstrip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
        assert (await operate(server, "/admin/requests", "GET"))["requests"] == []
        assert await operate(server, "/abort", request_id="one") == {"aborted": 0}
        for bad in ({}, {"request_id": 7}, {"request_id": ""}):
            assert (await operate(server, "/abort", **bad))[0] == 400
