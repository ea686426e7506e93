"""`allspan gateway`: HTTP and gRPC in front of ranks that another process, perhaps on another host, has started.

It holds no state but its open streams, so any number of them may serve one cluster: when one ends, the ranks drop its
requests and the others do not notice.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.sockets import Sockets, bind, needed_files
from allspan.launch.console import say
from allspan.launch.limits import allow_many_connections
from allspan.launch.secrets import take_secrets
from allspan.launch.settings import ResumeConfig
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import NO_TLS, TlsFiles

if TYPE_CHECKING:
    from allspan.client.async_engine import AsyncClientEngine


@dataclass(frozen=True, slots=True)
class AttachConfig:
    """The ranks that a gateway serves for."""

    tokenizer: str = ""
    """Names the model's folder or GGUF file on this host, from which the tokenizer and the chat template are read;
    empty takes the path that the ranks name."""
    attach_timeout: float = 600.0
    """Sets the seconds within which one replica must be ready."""
    rank_ssl_certfile: str = ""
    """Names the PEM certificate that this gateway shows to ranks that listen over TCP; a run directory names its
    own."""
    rank_ssl_keyfile: str = ""
    """Names the PEM file of its private key."""
    rank_ssl_ca_certs: str = ""
    """Names the PEM file of the authority that the ranks' certificates must be from."""
    rank_ssl_server_name: str = ""
    """Sets the name that the ranks' certificates must have, whatever their address; empty takes the host's."""

    @property
    def tls(self) -> TlsFiles:
        files = TlsFiles(
            self.rank_ssl_ca_certs, self.rank_ssl_certfile, self.rank_ssl_keyfile, self.rank_ssl_server_name
        )
        return files if files.is_given else NO_TLS


def sources(given: Sequence[str]) -> str | list[list[str]]:
    """Returns what `ClientEngine` attaches to: one run directory, URL or address as it is, else the addresses of the
    ranks of each replica. Raises ConfigError."""
    if not given:
        raise ConfigError("--attach is missing: give the cluster's run directory, or its ranks' addresses")
    if not all(entry.strip(" ,") for entry in given):
        raise ConfigError("--attach is empty: give the cluster's run directory, or its ranks' addresses")
    if len(given) == 1 and "," not in given[0]:
        return given[0]
    replicas = [[address.strip() for address in entry.split(",") if address.strip()] for entry in given]
    for address in (address for replica in replicas for address in replica):
        if "://" in address or (":" not in address and not address.endswith(".sock")):
            raise ConfigError(f"--attach has {address!r} among several; only ranks' addresses (HOST:PORT) may be more")
    return replicas


def run_gateway(where: Sequence[str], attach: AttachConfig, config: GatewayConfig, resume: ResumeConfig) -> int:
    """Serves until a signal; the first one drains, a second one ends at once. Returns the exit code.

    Raises ConfigError, Unavailable or DeadlineExceeded when there is nothing to attach to.
    """
    options: dict[str, Any] = {
        "attach": sources(where),
        "tls": attach.tls,
        "tokenizer": attach.tokenizer or None,
        "startup_timeout": attach.attach_timeout,
        "resume": resume.resume,
        "resume_timeout": resume.resume_timeout,
    }
    config = take_secrets(config)
    sockets = bind(config)
    try:
        from allspan.client.gateway.app import new_event_loop

        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(options, config, sockets))
    finally:
        sockets.close()
    say("stopped; the ranks go on without this gateway")
    return 0


async def _serve(options: dict[str, Any], config: GatewayConfig, sockets: Sockets) -> None:
    from allspan.client.gateway.app import serve_gateway

    allow_many_connections(needed_files(config))
    stop, reload = asyncio.Event(), asyncio.Event()
    _handle_signals(stop, reload)
    engine = await _attached(options, stop)
    try:
        tokenizer = await asyncio.to_thread(lambda: engine.tokenizer)

        def announce(http: str, grpc: str) -> None:
            say(f"Server is ready to accept requests: HTTP {http}/v1, gRPC {grpc}, attached to {engine.model}")

        await serve_gateway(engine, tokenizer, config, sockets, stop, announce, reload=reload)
    finally:
        await asyncio.to_thread(engine.close)


async def _attached(options: dict[str, Any], stop: asyncio.Event) -> AsyncClientEngine:
    """Returns an engine on the cluster; a signal that comes first ends the process."""
    from allspan.client.async_engine import AsyncClientEngine

    loop = asyncio.get_running_loop()
    attempt = asyncio.ensure_future(asyncio.to_thread(lambda: AsyncClientEngine(loop, **options)))
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait((attempt, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not attempt.done():
        os._exit(0)  # nothing is served yet, and the thread that waits for the ranks cannot be interrupted
    return attempt.result()


def _handle_signals(stop: asyncio.Event, reload: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        if stop.is_set():
            say("ending at once")
            os._exit(128 + number)
        say(f"{number.name}: shutting down; a second signal ends everything at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
