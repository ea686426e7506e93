"""Runs a rank's gRPC service on a thread of its own, so that it answers while the step loop is busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from allspan.protos.api.errors import ConfigError, InternalError
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.cluster.cluster_file import socket_path
from allspan.protos.cluster.tls import TlsFiles, is_loopback
from allspan.protos.config.settings import WorkerConfig
from allspan.protos.convert import SERVER_OPTIONS
from allspan.protos.worker_pb2_grpc import add_WorkerServicer_to_server
from allspan.worker.process.processors import ProcessorLoad
from allspan.worker.service.leases import Leases, Outcome, is_urgent
from allspan.worker.service.load_reader import LoadReader
from allspan.worker.service.mailbox import Mailbox
from allspan.worker.service.servicer import Core, Inspect, RankFacts, RankServicer

MAX_SOCKET_PATH = 100
"""Bytes; the system's limit is 104 to 108."""
ANY_HOST = ("0.0.0.0", "[::]")
START_TIMEOUT_S = 30.0
STOP_GRACE_S = 1.0
MAX_CONCURRENT_CALLS = 4096

_OPTIONS = (
    *SERVER_OPTIONS,
    ("grpc.so_reuseport", 0),
    # A client whose machine vanished is noticed, and its lease ends.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class LenientParsing(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Hands a method None for bytes that are no message of its kind, so that the method can say so with a status; gRPC
    by itself would answer UNKNOWN and log a traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer

        def lenient(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return None

        return handler._replace(request_deserializer=lenient)


class RankServer:
    """`start` once, `deliver` from the step loop, `stop` at the end."""

    def __init__(
        self,
        core: Core,
        facts: RankFacts,
        config: WorkerConfig,
        on_failure: Callable[[BaseException], None],
        inspect: Inspect,
        cpus: Sequence[int] = (),
        experts: Callable[[], Sequence[ExpertLoad]] = tuple,
    ) -> None:
        """`on_failure` is called, on the service's thread, when it breaks; `inspect` answers what the Inspect method
        is asked; `cpus` are where that thread may run; `experts` tells how many tokens each has
        had."""
        self._target = listen_target(config, facts.rank)
        self._tls = config.service.tls
        self._host_name = facts.host
        # A follower's inbox holds no more than this; see Lease.add.
        capacity = 2 * (config.scheduler.max_queued_requests + config.scheduler.max_num_seqs)
        load = ProcessorLoad(cpus)
        self._leases = Leases(capacity, config.scheduler.stream_interval, lambda: load.saturated)
        self._outcomes = Mailbox(self._leases.deliver, self._is_urgent, self._leases.release)
        self._servicer = RankServicer(core, self._leases, facts, config, inspect, LoadReader(experts))
        self._on_failure = on_failure
        self._cpus = tuple(cpus)
        self._thread = threading.Thread(target=self._main, name="service", daemon=True)
        self._started = threading.Event()
        self._address = ""
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def start(self) -> str:
        """Listens, and returns the address as a gRPC target. Raises ConfigError when it cannot."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise InternalError(f"the service did not listen on {self._target} within {START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise ConfigError(f"cannot listen on {self._target}: {self._failure}") from self._failure
        return self._address

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Hands a step's outputs to the streams of their clients; returns at once."""
        self._outcomes.post(outcomes)

    def stop(self) -> None:
        """Lets the streams carry what they hold, then ends them. Takes a few seconds at most."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the service has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_GRACE_S + 5.0)

    def _is_urgent(self, outcomes: list[Outcome]) -> bool:
        return any(is_urgent(result) for _, result in outcomes)

    def _main(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                self._on_failure(error)
            self._started.set()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        server = grpc.aio.server(
            interceptors=(LenientParsing(),), options=_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        add_WorkerServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
        if self._tls.is_given and not self._target.startswith("unix:"):
            port = server.add_secure_port(self._target, _credentials(self._tls))
        else:
            port = server.add_insecure_port(self._target)
        await server.start()
        if self._target.startswith("unix:"):
            os.chmod(self._target.removeprefix("unix:"), 0o600)
            self._address = self._target
        else:
            host = self._target.rpartition(":")[0]
            self._address = f"{self._host_name if host in ANY_HOST else host}:{port}"
        self._loop = asyncio.get_running_loop()
        self._outcomes.open()
        self._started.set()
        await self._stopping.wait()
        self._outcomes.flush()
        self._leases.close_all()
        await server.stop(STOP_GRACE_S)
        self._outcomes.close()


def listen_target(config: WorkerConfig, rank: int) -> str:
    """Where a rank listens, as a gRPC target. Raises ConfigError for a path that is too long, or an open address."""
    service = config.service
    if service.host:
        if not service.tls.is_given and not is_loopback(service.host):
            raise ConfigError(
                f"service.host is {service.host!r}, must be a loopback address: without certificates (service.tls) the "
                "ranks' wire is not encrypted, and anybody may use it"
            )
        port = service.port + rank if service.port else 0
        return f"[{service.host}]:{port}" if ":" in service.host else f"{service.host}:{port}"
    path = socket_path(Path(service.run_dir).resolve(), rank, service.epoch)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the path of the rank's socket has {len(os.fsencode(path))} bytes, at most {MAX_SOCKET_PATH} "
            f"(a limit of unix sockets): {path}; choose a shorter run directory"
        )
    return f"unix:{path}"


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """A client must show a certificate of the authority."""
    ca, certificate, key = tls.read()
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
