"""docs/security.md says of every route and method what it asks for, and the server does so."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from starlette.routing import BaseRoute, Route, Router

from allspan.client.gateway.application import make_app
from allspan.client.gateway.vllm_worker.service import VLLM_SERVICE
from allspan.protos import inference_pb2 as pb
from allspan.protos import vllm_worker_pb2
from support.gateway import fake_engine, front, gateway

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text()
KEY, ADMIN_KEY = "sk-user-0123456789abcdef", "sk-admin-0123456789abcdef"
OPEN, USER, ADMIN = "open", "user", "admin"


def listed() -> dict[str, str]:
    """Endpoint → who may call it, as the page has it."""
    table = PAGE.partition("| endpoint | asks for |")[2].partition("\n\n")[0]
    found = {}
    for name, asks in re.findall(r"^\| (?:gRPC )?`([^`]+)` \| (.*) \|$", table, re.MULTILINE):
        assert name not in found, f"{name} stands there twice"
        kinds = {"nothing": OPEN, "a key": USER, "the key that made it": USER, "the admin key": ADMIN}
        found[name] = next(kind for words, kind in kinds.items() if asks.startswith(words))
    return found


def flat(routes: Sequence[BaseRoute]) -> list[Route]:
    """Those of included routers in their place."""
    found: list[Route] = []
    for route in routes:
        within = getattr(route, "original_router", route)
        if isinstance(within, Router):
            found += flat(within.routes)
        else:
            assert isinstance(route, Route), route
            found.append(route)
    return found


def routes() -> dict[str, tuple[str, str]]:
    """The page's name of each route → its method and a path."""
    found = {}
    for route in flat(make_app(front()).routes):
        for method in route.methods or ():
            if method == "HEAD":
                continue
            named = "/page/*" if route.path.startswith("/page/") else route.path
            found[f"{method} {named}"] = method, re.sub(r"\{[^}]*\}", "x", route.path)
    return found


def methods() -> set[str]:
    """Of every service on the gRPC ports; those that are not ours by service."""
    ours = {f"{s.full_name}/{m.name}" for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods}
    ours |= {f"{VLLM_SERVICE}/{m.name}" for m in vllm_worker_pb2.DESCRIPTOR.services_by_name["VllmEngine"].methods}
    return ours | {"grpc.health.v1.Health", *(f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha"))}


def test_the_page_names_every_endpoint_and_no_other() -> None:
    assert set(listed()) == set(routes()) | methods()


async def test_every_route_asks_for_what_the_page_says() -> None:
    asks = listed()
    async with gateway(api_key=(KEY,), admin_api_key=ADMIN_KEY) as server:

        async def status(method: str, path: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return (await server.http.request(method, path, headers=headers)).status_code

        for name, (method, path) in routes().items():
            without, user, admin = [await status(method, path, key) for key in ("", KEY, ADMIN_KEY)]
            assert (without == 401) == (asks[name] != OPEN), name
            assert (user == 403) == (asks[name] == ADMIN), name
            assert user != 401, name
            assert admin not in (401, 403), name
            await server.http.post("/wake_up", headers={"Authorization": f"Bearer {ADMIN_KEY}"})


async def test_every_method_asks_for_what_the_page_says() -> None:
    asks = listed()
    async with (
        gateway(api_key=(KEY,), worker_port=0) as server,
        grpc.aio.insecure_channel(server.grpc_address) as inference,
        grpc.aio.insecure_channel(server.worker_address) as worker,
    ):
        own = {"Health": "Check", "ServerReflection": "ServerReflectionInfo"}
        for name in methods():
            method = name if "/" in name else f"{name}/{own[name.rpartition('.')[2]]}"
            channel = worker if method.startswith(VLLM_SERVICE) else inference
            codes = []
            for metadata in ((), (("x-api-key", KEY),)):
                call = channel.unary_stream(f"/{method}")(b"", metadata=metadata, timeout=1)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                codes.append(await call.code())
            refused = [code == grpc.StatusCode.UNAUTHENTICATED for code in codes]
            assert refused == [asks[name] != OPEN, False], name
            assert (codes[1] == grpc.StatusCode.PERMISSION_DENIED) == (asks[name] == ADMIN), name


@pytest.mark.parametrize(("flag", "status"), [(False, 401), (True, 200)])
async def test_metrics_may_be_opened(flag: bool, status: int) -> None:
    async with gateway(api_key=(KEY,), open_metrics=flag) as server:
        assert (await server.http.get("/metrics")).status_code == status


async def test_why_it_is_not_ready_is_told_with_a_key_only() -> None:
    engine = fake_engine(down_cause="rank 1 (pid 7 on gpu-box-3) died")
    async with gateway(engine, api_key=(KEY,)) as server:
        for headers, told in (({}, False), ({"x-api-key": "wrong"}, False), ({"x-api-key": KEY}, True)):
            ready = await server.http.get("/ready", headers=headers)
            assert (ready.status_code, "gpu-box-3" in ready.text) == (503, told)
    async with gateway(fake_engine(down_cause="rank 1 (pid 7 on gpu-box-3) died")) as server:
        assert "gpu-box-3" in (await server.http.get("/ready")).text
