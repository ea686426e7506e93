"""Ports, start and stop."""

from __future__ import annotations

import asyncio
import os
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from allspan.client.gateway.app import bind, new_event_loop
from allspan.client.gateway.config import GatewayConfig
from allspan.protos.api.errors import ConfigError
from support.gateway import eventually, fake_engine, gateway, gateway_config


def on_free_ports(**ports: int) -> GatewayConfig:
    return GatewayConfig(port=ports.get("port", 0), grpc_port=ports.get("grpc_port", 0))


@pytest.mark.parametrize(("flag", "field"), [("--port", "port"), ("--grpc-port", "grpc_port")])
def test_busy_port_is_refused_at_once_with_flag_and_owner(flag: str, field: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind(on_free_ports(**{field: port}))
    message = caught.value.message
    assert f"port {port} ({flag}) on 127.0.0.1 is in use by process {os.getpid()} (" in message
    assert f"choose another with {flag}" in message


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_ports_are_held_from_bind_on_although_nobody_listens_yet(which: str) -> None:
    first = bind(gateway_config(port=0, grpc_port=0))
    port = int(getattr(first, f"{which}_address").rsplit(":", 1)[1])
    config = GatewayConfig(port=port, grpc_port=0) if which == "http" else GatewayConfig(port=0, grpc_port=port)
    with pytest.raises(ConfigError, match="in use"):
        bind(config)
    first.close()
    bind(config).close()


async def test_a_second_gateway_cannot_share_the_ports_of_a_running_one() -> None:
    async with gateway() as server:
        for name, address in (("port", server.http_address), ("grpc_port", server.grpc_address)):
            with pytest.raises(ConfigError, match="in use"):
                bind(on_free_ports(**{name: int(address.rsplit(":", 1)[1])}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_other_hosts_than_loopback_need_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        bind(gateway_config(host=host, port=0, grpc_port=0))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_hosts_that_can_be_listened_on(host: str) -> None:
    sockets = bind(gateway_config(host=host, port=0, grpc_port=0, insecure=host == "0.0.0.0"))
    assert int(sockets.http_address.rsplit(":", 1)[1]) > 0
    assert int(sockets.grpc_address.rsplit(":", 1)[1]) > 0
    sockets.close()


def test_hosts_and_ports_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(gateway_config(host="192.0.2.1", port=0, grpc_port=0, insecure=True))
    with pytest.raises(ConfigError, match="--port is 65536, must be from 0"):
        bind(gateway_config(port=65536))


async def test_chat_template_file_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--chat-template /nonexistent"):
        async with gateway(chat_template="/nonexistent/template.jinja"):
            pass


async def test_stopping_is_not_serving_first_then_finishes_what_runs() -> None:
    async with gateway(fake_engine(step_s=0.02), shutdown_timeout=10) as server:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            running = asyncio.create_task(server.post("/v1/completions", prompt="x", max_tokens=40))
            await eventually(lambda: server.engine.asked)
            server.stop.set()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await server.http.get("/ready")).status_code == 503
            late = await server.post("/v1/completions", prompt="x")
            assert (late.status_code, late.json()["error"]["message"]) == (503, "the server is shutting down")
        finished = await running
        assert finished.json()["usage"]["completion_tokens"] == 40
        await asyncio.wait_for(server.task, 5)


async def test_what_still_runs_after_the_bound_is_told_why_and_stopped() -> None:
    async with gateway(fake_engine(endless=True, step_s=0.01), shutdown_timeout=0.1) as server:
        running = asyncio.create_task(server.post("/v1/completions", prompt="x", max_tokens=200))
        await eventually(lambda: server.engine.asked)
        server.stop.set()
        response = await running
        assert (response.status_code, response.json()["error"]["message"]) == (503, "the server is shutting down")
        assert server.engine.last.stopped
        await asyncio.wait_for(server.task, 5)


async def test_cancelling_stops_at_once_and_frees_the_ports() -> None:
    async with gateway(fake_engine(endless=True, step_s=0.01), shutdown_timeout=60) as server:
        running = asyncio.create_task(server.post("/v1/completions", prompt="x", max_tokens=200))
        await eventually(lambda: server.engine.asked)
        server.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(server.task, 5)
        assert (await running).status_code == 503
        assert server.engine.last.stopped
        port = int(server.http_address.rsplit(":", 1)[1])
        bind(gateway_config(port=port, grpc_port=int(server.grpc_address.rsplit(":", 1)[1]))).close()


def test_uvloop_runs_the_gateway_where_it_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def once() -> int:
        async with gateway() as server:
            return (await server.post("/v1/completions", prompt="x")).status_code

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert isinstance(runner.get_loop(), uvloop.Loop)
        assert runner.run(once()) == 200
