"""With keys set nobody comes in without one: every route and every method, whatever is added later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.routing import BaseRoute, Route, Router

from allspan.client.gateway.application import make_app
from allspan.client.gateway.auth.caller import Caller
from allspan.client.gateway.auth.keys import Keys, load_keys
from allspan.client.gateway.config import SecurityConfig
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import ConfigError, Unauthenticated
from support.gateway import eventually, front, gateway, gateway_config, stub

KEY, OTHER, ADMIN_KEY = "sk-first-0123456789abcdef", "sk-second-0123456789abcdef", "sk-admin-0123456789abcdef"
COMPLETIONS = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes() -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers, a value for each parameter."""
    found = []
    for route in flat(make_app(front()).routes):
        assert isinstance(route, Route), f"{route}: this test does not know what it answers"
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


def flat(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Those of included routers in their place."""
    found: list[BaseRoute] = []
    for route in routes:
        within = getattr(route, "original_router", route)
        found += flat(within.routes) if isinstance(within, Router) else [route]
    return found


async def test_every_route_but_the_probes_and_the_page_needs_a_key() -> None:
    listed = routes()
    assert ("POST", COMPLETIONS) in listed
    assert len(listed) > 8
    async with gateway(api_key=(KEY, OTHER)) as server:
        for method, path in listed:
            for headers in ({}, bearer("wrong"), {"Authorization": f"Basic {KEY}"}, {"x-api-key": "wrong"}):
                answer = await server.http.request(method, path, headers=headers)
                if path in ("/", "/docs", "/health", "/ready") or path.startswith("/page/"):
                    assert answer.status_code == (404 if path == "/page/x" else 200), path
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-request-id"]
                if method == "HEAD" or path.startswith(("/v1/messages", "/api/")):  # which have errors of another form
                    continue
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert server.engine.asked == {}
        for path in ("/nothing", "/health/", "/health/../v1/models", "/page/../v1/models", "/PAGE/x"):
            assert (await server.http.get(path)).status_code == 401, path
        assert (await server.http.options(COMPLETIONS)).status_code == 401


async def test_any_of_the_keys_opens_everything_for_users() -> None:
    async with gateway(api_key=(KEY, OTHER), admin_api_key=ADMIN_KEY) as server:
        for headers in (
            bearer(KEY),
            bearer(OTHER),
            bearer(ADMIN_KEY),
            {"x-api-key": KEY},
            {"authorization": f"bearer  {KEY}"},
        ):
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        async with openai.AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key=OTHER) as client:
            assert (await client.models.list()).data[0].id == "tiny"
        async with openai.AsyncOpenAI(base_url=f"{server.http_address}/v1", api_key="nope", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="not known here"):
                await client.models.list()


async def test_without_keys_any_key_will_do() -> None:
    async with gateway() as server:
        for headers in ({}, bearer("EMPTY")):
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


METHODS = [
    *(
        f"/{service.full_name}/{method.name}"
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/allspan.v1.Inference/Nothing",
    "/x/y",
]


async def test_every_grpc_method_but_health_needs_a_key() -> None:
    async with (
        gateway(api_key=(KEY,)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        for method in METHODS:
            for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "wrong"),)):
                for call in (
                    channel.unary_stream(method)(b"", metadata=metadata, timeout=5),
                    channel.stream_stream(method)(metadata=metadata, timeout=5),
                ):
                    assert await call.code() == grpc.StatusCode.UNAUTHENTICATED, method
                    assert dict(await call.trailing_metadata())["allspan-error-code"] == "invalid_api_key"
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        assert server.engine.asked == {}


async def test_a_key_in_the_metadata_opens_the_service_and_reflection() -> None:
    async with (
        gateway(api_key=(KEY,)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        metadata = (("authorization", f"Bearer {KEY}"),)
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), metadata=metadata, timeout=10)
        assert [response async for response in call]
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata, timeout=5
        )
        names = {service.name async for answer in listing for service in answer.list_services_response.service}
        assert "allspan.v1.Inference" in names


async def test_a_request_belongs_to_its_key_over_http_and_grpc(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    owners = []
    async with (
        gateway(api_key=(KEY, OTHER)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        for key in (KEY, OTHER):
            answer = await server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=bearer(key))
            assert answer.status_code == 200
            call = stub(channel).Generate(
                pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(max_tokens=1)),
                metadata=(("x-api-key", key),),
                timeout=10,
            )
            assert [response async for response in call]
            owners.append(Keys({key: ""}).caller(key).owner)
    lines = [line for line in caplog.messages if line.startswith("finished")]
    assert [[owner in line for owner in owners] for line in lines] == [[True, False]] * 2 + [[False, True]] * 2
    for key in (KEY, OTHER):
        assert key not in caplog.text


async def test_no_key_known_or_wrong_shows_in_logs_answers_or_configuration(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    wrong = "sk-wrong-0123456789abcdef"
    async with (
        gateway(api_key=(KEY,), admin_api_key=ADMIN_KEY) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        said = ""
        for key in (KEY, wrong, ADMIN_KEY):
            for path in ("/v1/models", "/nothing", "/health", "/ready"):
                answer = await server.http.get(path, headers=bearer(key))
                said += answer.text + str(answer.headers)
            call = stub(channel).Generate(pb.GenerateRequest(), metadata=(("x-api-key", key),), timeout=5)
            said += str(await call.code()) + str(await call.details()) + str(await call.trailing_metadata())
    config = gateway_config(api_key=(KEY,), admin_api_key=ADMIN_KEY)
    ours = "\n".join(f"{r.getMessage()} {r.exc_text}" for r in caplog.records if r.name.startswith("allspan"))
    for key in (KEY, wrong, ADMIN_KEY):
        assert key not in said + ours + repr(config) + repr(vars(load_keys(config.security)))


FILES: list[tuple[str, dict[str, Any]]] = [
    ("sk-one\n", {"sk-one": "key-"}),
    (
        "# tenants\n\nalice sk-one\r\n  bob\tsk-two  \nsk-three",
        {"sk-one": "alice", "sk-two": "bob", "sk-three": "key-"},
    ),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_a_key_file_has_a_key_a_line_and_names(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    (tmp_path / "keys").write_text(text)
    keys = load_keys(SecurityConfig(api_key_file=str(tmp_path / "keys")))
    for key, name in expected.items():
        assert keys.caller(key).owner.startswith(name)
    with pytest.raises(Unauthenticated):
        keys.caller("alice")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("a b sk-secret", "line 1"),
        ("ok\nname: sk-secret", "line 2"),
        ("sk-sécret", "line 1"),
        ("admin sk-secret", "'admin' is taken"),
        ("bob sk-secret\nbob sk-secret2", "line 2"),
        ("x" * 5000, "5000 characters, at most 4096"),
    ],
)
def test_what_is_no_key_is_refused_by_place_without_being_shown(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(SecurityConfig(api_key_file=str(tmp_path / "keys")))
    assert words in caught.value.message
    assert str(tmp_path / "keys") in caught.value.message
    assert "secret" not in caught.value.message.lower()


@pytest.mark.parametrize(
    "config",
    [
        SecurityConfig(api_key=()),
        SecurityConfig(api_key=("",)),
        SecurityConfig(admin_api_key=""),
        SecurityConfig(api_key=("one two",)),
        SecurityConfig(api_key_file="/nonexistent/keys"),
        SecurityConfig(admin_api_key_file="/nonexistent/keys"),
        SecurityConfig(api_key=("same",), admin_api_key="same"),
    ],
)
def test_a_key_that_is_missing_or_empty_never_opens_the_server(config: SecurityConfig) -> None:
    with pytest.raises(ConfigError):
        load_keys(config)


def test_keys_are_compared_as_digests_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((len(known), len(given)))
        return known == given

    monkeypatch.setattr("allspan.client.gateway.auth.keys.hmac.compare_digest", compare)
    keys = Keys({KEY: "first", OTHER: ""}, ADMIN_KEY)
    for key in (KEY, OTHER, ADMIN_KEY, "", "x", "y" * 100_000):
        compared.clear()
        keys.find(key)
        assert compared == [(32, 32)] * 3
    assert keys.find(KEY) == Caller("first")
    assert keys.find(ADMIN_KEY) == Caller("admin", is_admin=True)
    assert keys.find("ключ\udcff") is None


async def test_keys_are_read_again_when_asked_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}\n")

    async def status(key: str) -> int:
        return (await server.http.get("/v1/models", headers=bearer(key))).status_code

    async def reload(text: str, words: str) -> None:
        file.write_text(text)
        server.reload.set()
        await eventually(lambda: words in caplog.text)

    async with gateway(api_key_file=str(file), admin_api_key=ADMIN_KEY) as server:
        assert [await status(key) for key in (KEY, OTHER, ADMIN_KEY)] == [200, 401, 200]
        await reload("", "the API keys in use stay: --api-key-file")
        assert [await status(key) for key in (KEY, OTHER, ADMIN_KEY)] == [200, 401, 200]
        await reload(f"bob {OTHER}\n", "have been read again")
        assert [await status(key) for key in (KEY, OTHER, ADMIN_KEY)] == [401, 200, 200]
