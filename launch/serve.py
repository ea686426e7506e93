"""`allspan serve`: finds the model, places the ranks, supervises the cluster and runs the gateway in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from allspan import __version__
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.sockets import Sockets, bind, needed_files
from allspan.launch.console import say
from allspan.launch.hosts.fleet import Fleet
from allspan.launch.hosts.mpirun import check_mpirun
from allspan.launch.hosts.start import laid_out, prepare_wire
from allspan.launch.limits import allow_many_connections, check_file_size
from allspan.launch.logs import LogCopy
from allspan.launch.models.checkpoint_files import check_files, check_stages
from allspan.launch.models.conversion import with_its_ranks
from allspan.launch.models.draft_model import with_its_path
from allspan.launch.models.find_model import FoundModel, resolve_model
from allspan.launch.placement.binding import Bound
from allspan.launch.placement.placement import Placement
from allspan.launch.secrets import take_secrets
from allspan.launch.settings import ResumeConfig, ServeSettings
from allspan.launch.supervision import mpi
from allspan.launch.supervision.cluster import Cluster
from allspan.launch.supervision.run_dir import make_run_dir
from allspan.launch.supervision.world import WorldPlan
from allspan.protos.api.errors import ConfigError, DeadlineExceeded, Unavailable
from allspan.protos.cluster.running import LOG_FILE, RunRecord, write_addresses, write_record
from allspan.protos.config.adapters import checked_adapters, parse_modules
from allspan.protos.config.settings import ParallelConfig, ServiceConfig, WorkerConfig

if TYPE_CHECKING:
    from allspan.client.async_engine import AsyncClientEngine
    from allspan.protos.text import SamplingDefaults, Tokenizer

END_MARGIN_S = 4.0
"""Seconds that an orderly shutdown may take beyond the time given to open requests or to the ranks."""
ATTACH_TIMEOUT_S = 5.0
ATTACH_PAUSE_S = 0.5

logger = logging.getLogger("allspan.gateway")


class Interrupt:
    """The handler of Ctrl-C and SIGTERM: the first signal starts an orderly shutdown, the second ends everything at
    once.

    So does an orderly end that takes END_MARGIN_S longer than `drain_s`, which requests that run have to finish.
    """

    def __init__(self, drain_s: float) -> None:
        self.requested = False
        self._drain_s = drain_s
        self._drain_until = 0.0
        self._timer: threading.Timer | None = None
        self._cluster: Cluster | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._reload: asyncio.Event | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGHUP, self._read_again)
        signal.signal(signal.SIGUSR2, self._restart)

    @property
    def remaining_s(self) -> float:
        """Returns the seconds that running requests still have; 0 unless a signal started the shutdown."""
        return max(0.0, self._drain_until - time.monotonic()) if self.requested else 0.0

    def watch(self, cluster: Cluster) -> None:
        """Makes a signal end this cluster from now on (at once, if one came before)."""
        self._cluster = cluster
        if self.requested:
            cluster.stop()

    def watch_gateway(self, stop: asyncio.Event, reload: asyncio.Event) -> None:
        """Makes a signal end the gateway first from now on, and SIGHUP set `reload`; must be called on the gateway's
        loop."""
        self._loop, self._stop, self._reload = asyncio.get_running_loop(), stop, reload
        if self.requested:
            stop.set()

    def end_gateway(self) -> None:
        """Ends the gateway from any thread; nothing when there is none (any more)."""
        self._set(self._stop)

    def _set(self, event: asyncio.Event | None) -> None:
        if self._loop is not None and event is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the gateway has ended
                self._loop.call_soon_threadsafe(event.set)

    def _read_again(self, number: int, frame: FrameType | None) -> None:
        """SIGHUP, which a terminal sends that is closed, too: it ends nothing."""
        self._set(self._reload)

    def _restart(self, number: int, frame: FrameType | None) -> None:
        """SIGUSR2: the replicas get new ranks, one after another."""
        if self._cluster is not None and not self.requested:
            self._cluster.restart(self._drain_s)

    def done(self) -> None:
        """The end has come in order."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut_short(self, number: int) -> None:
        say(f"the shutdown has taken more than {self._drain_s + END_MARGIN_S:g} s: ending at once")
        self._end_at_once(number)

    def _end_at_once(self, number: int) -> NoReturn:
        try:
            if self._cluster is not None:
                self._cluster.end_at_once()
        finally:
            os._exit(128 + number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._cluster is None:
            raise KeyboardInterrupt  # nothing runs yet
        if self.requested:
            say("ending at once")
            self._end_at_once(number)
        self.requested = True
        self._drain_until = time.monotonic() + self._drain_s
        self._timer = threading.Timer(self._drain_s + END_MARGIN_S, self._cut_short, (number,))
        self._timer.daemon = True
        self._timer.start()
        if self._stop is not None:
            say(f"{signal.Signals(number).name}: shutting down; a second signal ends everything at once")
            self.end_gateway()
        else:
            say("shutting down")  # mostly a ClientEngine's close, which is no news of a signal
            self._cluster.stop(self._drain_s)


def serve(settings: ServeSettings, log: LogCopy | None = None) -> int:
    """Runs until a signal, the parent's end, or a failure that is not to be mended. Returns the exit code. `log` is
    kept in the run directory.

    Raises AllspanError for what ends it otherwise; then nothing of the cluster is left.
    """
    _check(settings)
    if settings.gateway is not None:
        settings = replace(settings, gateway=take_secrets(settings.gateway))
    settings = replace(settings, adapters=checked_adapters(settings.adapters, settings.served_model_name))
    settings = with_its_ranks(settings)
    if (stages := settings.placement.stages) > 1:  # before other hosts are asked, or cores counted
        check_stages(resolve_model(settings.model, settings.hub).path, stages)
    with laid_out(settings.hosts, settings.placement, settings.weights.device) as (bound, fleet):
        return _serve(settings, bound, fleet, log)


def _serve(settings: ServeSettings, bound: Bound, fleet: Fleet | None, log: LogCopy | None) -> int:
    mpirun = mpi.find_mpirun()
    if fleet is not None:
        check_mpirun(mpirun)
    model = resolve_model(settings.model, settings.hub)
    parse_modules(settings.adapters, (model.name,))
    has_weights = settings.weights.load_format != "dummy"
    check_files(model.path, has_weights)
    settings = replace(settings, scheduler=with_its_path(settings.scheduler, settings.hub, has_weights))
    sockets = bind(settings.gateway) if settings.gateway else None
    interrupt = Interrupt(settings.shutdown_timeout)
    try:
        cluster = _start(settings, model, (bound, fleet), mpirun, interrupt, log)
        try:
            inputs = _prepare_gateway(model, settings.gateway, sockets) if settings.gateway and sockets else None
            ready = cluster.wait_ready()
            if ready and not interrupt.requested:
                _front(settings, cluster, interrupt, inputs)
        finally:
            cluster.stop(interrupt.remaining_s)
            cluster.join()
            interrupt.done()
    finally:
        if sockets is not None:
            sockets.close()
    if cluster.error is not None and not interrupt.requested:
        raise cluster.error
    say("stopped; all processes and files of the cluster are removed")
    return 0


def _check(settings: ServeSettings) -> None:
    """Checks the settings that can be refused before anything is fetched or started."""
    if sys.platform != "linux":
        raise ConfigError(
            f"a cluster needs Linux, this is {sys.platform}; the client alone works here (on Windows: WSL2)"
        )
    check_file_size()
    settings.wire.check()
    length = settings.weights.max_model_len
    if length and length < 2:
        raise ConfigError(f"--max-model-len is {length}, must be at least 2 (a prompt token and an output token)")


@dataclass(frozen=True, slots=True)
class GatewayInputs:
    """The parts of a model that the gateway reads from its files, and its sockets."""

    sockets: Sockets
    tokenizer: Tokenizer
    defaults: SamplingDefaults


def _prepare_gateway(model: FoundModel, config: GatewayConfig, sockets: Sockets) -> GatewayInputs:
    """Loads and checks what the gateway needs beside the ranks, while they load: its libraries take most of a second.
    Raises CheckpointError, ConfigError."""
    from allspan.client.gateway.app import with_template
    from allspan.protos.text import load_tokenizer, sampling_defaults
    from allspan.protos.text.chat_template import renderers

    renderers.warm()
    tokenizer = load_tokenizer(model.path)
    with_template(tokenizer, config)
    return GatewayInputs(sockets, tokenizer, sampling_defaults(model.path, model.name, config.generation))


def _start(
    settings: ServeSettings,
    model: FoundModel,
    laid: tuple[Bound, Fleet | None],
    mpirun: mpi.Mpirun,
    interrupt: Interrupt,
    log: LogCopy | None,
) -> Cluster:
    """`interrupt` watches the cluster before any process of it runs."""
    bound, fleet = laid
    placement = bound.placement
    name = settings.served_model_name[0] if settings.served_model_name else model.name
    run = make_run_dir(settings.supervisor.run_dir, replicas=placement.replicas)
    config = WorkerConfig(
        model=replace(settings.weights, path=str(model.path), name=name),
        service=ServiceConfig(
            run_dir=str(run.path),
            host=settings.wire.rank_host,
            port=settings.wire.rank_port,
            supervisor_pid=os.getpid(),
            watchdog_timeout=settings.supervisor.watchdog_timeout,
            shutdown_timeout=settings.shutdown_timeout,
        ),
        cache=settings.cache,
        scheduler=settings.scheduler,
        parallel=parallel_config(settings, placement),
        adapters=settings.adapters,
    )
    say(f"allspan {__version__}, {settings.given}")
    say(f"serving {name} from {model.path}: {placement.describe()}, memory {bound.memory}; {mpirun}")
    try:
        wire = settings.wire
        tls = wire.prepare(run.path) if fleet is None else prepare_wire(wire, fleet, run.path)
        config = replace(config, service=replace(config.service, tls=tls))
        plan = WorldPlan(config, placement, mpirun, bound.numactl, settings.supervisor.start_timeout_s, fleet)
        cluster = Cluster(_plans(plan), run, settings.supervisor)
        interrupt.watch(cluster)
    except BaseException:
        run.remove()
        raise
    if log is not None:
        log.keep_in(run.path / LOG_FILE)
    _record(run.path, settings, config, len(placement.ranks))
    cluster.start()
    say("loading the model" + (f" on {len(placement.ranks)} ranks" if len(placement.ranks) > 1 else ""))
    return cluster


def _record(run_dir: Path, settings: ServeSettings, config: WorkerConfig, num_ranks: int) -> None:
    """Writes what `allspan ps` shows of this cluster."""
    record = RunRecord(
        pid=os.getpid(),
        name=config.model.name,
        model_path=config.model.path,
        num_ranks=num_ranks,
        started_at=time.time(),
        booted_s=time.clock_gettime(time.CLOCK_BOOTTIME),
        parent_pid=settings.supervisor.parent_pid,
    )
    try:
        write_record(run_dir, record)
    except OSError as error:
        say(f"{run_dir} cannot be written to: {error.strerror}; allspan ps does not show this cluster")


def parallel_config(settings: ServeSettings, placement: Placement) -> ParallelConfig:
    """Returns the ranks' parallel settings; a collective's timeout exceeds the watchdog's, so that a rank stopped for a
    short time can continue."""
    timeout_s, watchdog_s = settings.parallel.timeout_s, settings.supervisor.watchdog_timeout
    if timeout_s < 2 * watchdog_s:
        timeout_s = 2 * watchdog_s
        say(f"--timeout-s is raised to {timeout_s:g} s, twice --watchdog-timeout, so that the watchdog acts first")
    return replace(settings.parallel, oversubscribed=placement.oversubscribed, timeout_s=timeout_s)


def _plans(plan: WorldPlan) -> list[WorldPlan]:
    """Returns the plan of each replica's world."""
    worlds = plan.placement.worlds()
    if len(worlds) == 1:
        return [plan]
    plans = []
    for index, world in enumerate(worlds):
        service = replace(plan.config.service, replica=index)
        if service.port:
            service = replace(service, port=service.port + index * len(world.ranks))
        plans.append(replace(plan, config=replace(plan.config, service=service), placement=world, replica=index))
    return plans


def _front(settings: ServeSettings, cluster: Cluster, interrupt: Interrupt, inputs: GatewayInputs | None) -> None:
    """Serves until the cluster ends: runs the gateway, or only prints a ready line for the parent program."""
    if inputs is None:
        ready = {"run_dir": str(cluster.run_dir), "model": cluster.info.model if cluster.info else ""}
        print(f"ALLSPAN READY {json.dumps(ready)}", flush=True)
        cluster.join()
        return
    from allspan.client.gateway.app import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_gateway(settings, cluster, interrupt, inputs))


async def _gateway(settings: ServeSettings, cluster: Cluster, interrupt: Interrupt, inputs: GatewayInputs) -> None:
    from allspan.client.gateway.app import serve_gateway

    assert settings.gateway is not None

    allow_many_connections(needed_files(settings.gateway))
    stop = asyncio.Event()
    reload = asyncio.Event()
    interrupt.watch_gateway(stop, reload)
    cluster.on_end(interrupt.end_gateway)
    engine = await _attach(cluster.run_dir, settings.resume, stop)
    if engine is None:
        return
    try:

        def announce(http: str, grpc: str) -> None:
            _announce(engine.model, http, grpc, cluster.run_dir)

        tokenizer, defaults = inputs.tokenizer, inputs.defaults
        await serve_gateway(engine, tokenizer, settings.gateway, inputs.sockets, stop, announce, defaults, reload)
    finally:
        await asyncio.to_thread(engine.close)


async def _attach(run_dir: Path, resume: ResumeConfig, stop: asyncio.Event) -> AsyncClientEngine | None:
    """Connects to the world that is ready or, if it ends before that, to the next one. None when `stop` comes first."""
    from allspan.client.async_engine import AsyncClientEngine

    loop = asyncio.get_running_loop()

    def attach() -> AsyncClientEngine:
        return AsyncClientEngine(
            loop,
            attach=run_dir,
            startup_timeout=ATTACH_TIMEOUT_S,
            resume=resume.resume,
            resume_timeout=resume.resume_timeout,
        )

    while not stop.is_set():
        try:
            return await asyncio.to_thread(attach)
        except (ConfigError, DeadlineExceeded, Unavailable) as error:
            logger.info("the gateway is not attached yet: %s", error.message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_PAUSE_S):
                await stop.wait()
    return None


def _announce(model: str, http: str, grpc: str, run_dir: Path) -> None:
    write_addresses(run_dir, http, grpc)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    say(f"Server is ready to accept requests: HTTP {http}/v1, gRPC {grpc}, run directory {run_dir}")
    say(f"try: curl -N {http}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")


def failed_line(error_code: str, message: str) -> str:
    """The line of `--no-gateway` for a start that failed, read by the program that waits for the ready line."""
    return f"ALLSPAN FAILED {json.dumps({'code': error_code, 'message': message})}"
