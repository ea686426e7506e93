"""The gateway's process side: all servers in one asyncio loop, from the first byte to the last.

    sockets = bind(config)  # before the model loads
    …
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve_gateway(engine, tokenizer, config, sockets, stop, on_started))

It knows neither signals nor clusters; its caller sets `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import uvicorn

from allspan.client.gateway.application import make_app
from allspan.client.gateway.auth.keys import load_keys
from allspan.client.gateway.auth.tls import Tls
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.client.gateway.grpc.health import EngineHealth
from allspan.client.gateway.grpc.server import grpc_server, inference_front
from allspan.client.gateway.grpc.service import SERVICE
from allspan.client.gateway.kv_events.publisher import published
from allspan.client.gateway.server.connections import Connections
from allspan.client.gateway.server.listener import Listener
from allspan.client.gateway.server.protocol import GuardedProtocol
from allspan.client.gateway.sockets import Sockets, bind, hand_over
from allspan.client.gateway.telemetry.redaction import without_keys
from allspan.client.gateway.telemetry.status_line import StatusLine
from allspan.client.gateway.vllm_worker.kv_journal import KvJournal
from allspan.client.gateway.vllm_worker.service import VLLM_SERVICE, worker_front
from allspan.protos.api.errors import ConfigError, InternalError
from allspan.protos.cluster.tls import is_loopback
from allspan.protos.text import SamplingDefaults, Tokenizer

__all__ = ["GatewayConfig", "Sockets", "bind", "new_event_loop", "serve_gateway", "with_template"]

CLOSE_S = 1.0
WARM_UP_AFTER_S = 1.0
"""Seconds that the first requests have the processors to themselves."""

logger = logging.getLogger("allspan.gateway")

Started = Callable[[str, str], None]


async def serve_gateway(
    engine: GatewayEngine,
    tokenizer: Tokenizer,
    config: GatewayConfig,
    sockets: Sockets,
    stop: asyncio.Event,
    on_started: Started | None = None,
    defaults: SamplingDefaults | None = None,
    reload: asyncio.Event | None = None,
) -> None:
    """Serves until `stop` is set, then drains: not ready, running requests finish (`shutdown_timeout`), all closes.

    Cancelling it stops at once. `on_started(http_address, grpc_address)` is called when both servers answer. Takes over
    `sockets`, never `engine`. `defaults`: those of the model's sampling fields, if they are read already. Setting
    `reload` has keys and certificates read again. Raises ConfigError, CheckpointError, InternalError.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(sockets))
        context = GatewayContext.of(engine, with_template(tokenizer, config), config, defaults)
        stack.enter_context(without_keys(context.keys.hide))
        health = EngineHealth(lambda: context.admission.is_ready, ("", SERVICE, VLLM_SERVICE))
        hand_over(sockets)
        tls = Tls.of(config.security)
        async with (
            published(config.kv_events, engine.page_events() if config.kv_events.kv_events_endpoint else ()),
            _grpc_servers(context, health, sockets, tls),
            _http_server(context, sockets.http, tls) as http,
        ):
            following = [
                asyncio.create_task(health.follow()),
                asyncio.create_task(StatusLine(context.snapshots).follow()),
                asyncio.create_task(_warm_up(context)),
            ]
            if tls is not None:
                following.append(asyncio.create_task(tls.follow()))
            if reload is not None:
                following.append(asyncio.create_task(_follow_reloads(reload, context, tls)))
            try:
                if not is_loopback(config.host) and not context.keys.has_users:
                    logger.warning("no API key is set: whoever reaches %s may use the model", sockets.http_address)
                logger.info("Sampling defaults: %s.", context.model.defaults.sentence())
                if on_started is not None:
                    on_started(sockets.http_address, sockets.grpc_address)
                await _first(stop, http)
                await health.enter_graceful_shutdown()
                await context.admission.drain(config.shutdown_timeout)
            finally:
                for task in following:
                    task.cancel()
                await context.admission.drain(0.0)
                await context.admission.grammars.close()
                if context.telemetry.traces is not None:
                    await asyncio.to_thread(context.telemetry.traces.close)


@contextlib.asynccontextmanager
async def _grpc_servers(
    context: GatewayContext, health: EngineHealth, sockets: Sockets, tls: Tls | None
) -> AsyncIterator[None]:
    fronts = [inference_front(context, sockets)]
    async with contextlib.AsyncExitStack() as servers:
        if sockets.worker is not None:
            kept = context.config.kv_events.kv_events_buffer_steps
            journal = await servers.enter_async_context(KvJournal(context.engine.page_events, kept))
            fronts.append(worker_front(context, sockets.worker_address, sockets.worker, journal))
        for front in fronts:
            await servers.enter_async_context(grpc_server(context, health, front, tls))
        for front in fronts[1:]:
            logger.info("%s listens on %s (--worker-port).", VLLM_SERVICE, front.address)
        yield


async def _warm_up(context: GatewayContext) -> None:
    """Prepares what the first request with a grammar or a required tool call would wait for."""
    await asyncio.sleep(WARM_UP_AFTER_S)
    await context.admission.grammars.warm_up()


async def _follow_reloads(reload: asyncio.Event, context: GatewayContext, tls: Tls | None) -> None:
    """Reads keys and certificates again whenever the event is set; what is wrong with them is logged."""
    while True:
        await reload.wait()
        reload.clear()
        try:
            context.keys.replace(await asyncio.to_thread(load_keys, context.config.security))
            logger.info("the files of API keys and certificates have been read again")
        except ConfigError as error:
            logger.warning("the API keys in use stay: %s", error.message)
        if tls is not None:
            await asyncio.to_thread(tls.renew)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def with_template(tokenizer: Tokenizer, config: GatewayConfig) -> Tokenizer:
    """The tokenizer with --chat-template in place of the model's own. ConfigError when the file cannot be read."""
    source = config.chat.chat_template
    if not source:
        return tokenizer
    if "{" not in source:
        try:
            source = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat-template {source}: {error}") from error
    return tokenizer.with_chat_template(source)


class _HttpServer(uvicorn.Server):
    """uvicorn with an accept loop of our own, and without signal handlers (the process has one owner of those)."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        loop = asyncio.get_running_loop()

        def protocol() -> GuardedProtocol:
            return GuardedProtocol(
                self._connections, config=self.config, server_state=self.server_state, app_state={}, _loop=loop
            )

        self.servers = [Listener(sock, self._connections, protocol, self.config.ssl) for sock in sockets]  # type: ignore[misc]
        for listener in self.servers:
            listener.start()  # type: ignore[attr-defined]
        self.started = True
        self.listening.set()


@contextlib.asynccontextmanager
async def _http_server(
    context: GatewayContext, sock: socket.socket, tls: Tls | None
) -> AsyncIterator[asyncio.Task[None]]:
    security, limits = context.config.security, context.config.limits
    config = uvicorn.Config(
        make_app(context),
        timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(CLOSE_S),
        ssl_certfile=security.ssl_certfile or None,
        ssl_keyfile=security.ssl_keyfile or None,
        ssl_ca_certs=security.ssl_ca_certs or None,
        ssl_cert_reqs=security.ssl_cert_reqs,
    )
    config.load()
    if tls is not None and config.ssl is not None:
        tls.keep(config.ssl)
    server = _HttpServer(config, Connections(limits))
    task = asyncio.create_task(server.serve([sock]))
    try:
        await _first(server.listening, task)
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait([task], timeout=3 * CLOSE_S)
        task.cancel()


async def _first(event: asyncio.Event, server: asyncio.Task[None]) -> None:
    """Waits for the event; InternalError when the server ends before."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting, server), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if server.done():
        raise InternalError("the HTTP server ended by itself") from (None if server.cancelled() else server.exception())
