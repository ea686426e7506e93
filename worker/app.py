"""A rank, put together: the one place where its parts are made and handed to each other."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import zlib
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

import allspan
from allspan.protos.api.errors import ConfigError, DeadlineExceeded, Unavailable
from allspan.protos.cluster import logs
from allspan.protos.cluster.cluster_file import (
    ClusterInfo,
    RankInfo,
    error_file,
    heartbeat_file,
    rank_file,
    write_cluster,
    write_rank,
)
from allspan.protos.cluster.progress import Progress
from allspan.protos.config.adapters import parse_modules
from allspan.protos.config.settings import WorkerConfig
from allspan.worker.backend.table import open_backend
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.load.expert_moves import rebalance_regularly
from allspan.worker.load.introspection import Inspection
from allspan.worker.load.loader import open_ops
from allspan.worker.parallel.world import World, join_world
from allspan.worker.process import host
from allspan.worker.process.heartbeat_writer import HeartbeatWriter
from allspan.worker.process.release_memory import keep_freed_memory, num_memory_nodes
from allspan.worker.scheduler.plan import Operation
from allspan.worker.service.server import RankServer, listen_target
from allspan.worker.service.servicer import RankFacts
from allspan.worker.step.backend import Backend

STOP_LIMIT_S = 8.0
"""An orderly end that takes longer is cut short."""
DRAIN_WORD_S = 5.0
"""Between two words about requests that keep a rank from ending."""

logger = logging.getLogger(__name__)


def run_rank(config: WorkerConfig) -> NoReturn:
    """Serves until it is stopped, and ends this process with code 0. A failure ends it with code 1, and all ranks."""
    ranks = host.place()
    rank = ranks[0] if ranks else 0
    run_dir, epoch = Path(config.service.run_dir), config.service.epoch
    exit_report = host.ExitReport(error_file(run_dir, rank, epoch), rank)
    world: World | None = None
    try:
        if ranks is not None:
            host.die_with_parent()
        _prepare_process(config, rank)
        heartbeat = _prepare_run_dir(config, rank)
        write_rank(run_dir, RankInfo(rank, os.getpid(), host.host_name()), epoch)
        stop = Stop(exit_report, config.service.shutdown_timeout)
        stop.watch_supervisor(config.service.supervisor_pid)
        backend = open_backend(config.model.device, config.service.watchdog_timeout)
        world = join_world(config.parallel, backend.collectives)
        serve(config, world, backend, stop, heartbeat)
    except BaseException as error:
        exit_report.write(error)
        if world is not None:
            world.abort(1)
        _exit(1)
    heartbeat.stop()
    rank_file(run_dir, rank, epoch).unlink(missing_ok=True)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """At once: what an interpreter does at its end could wait for other ranks, and takes seconds with torch loaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(config: WorkerConfig, world: World, backend: Backend, stop: Stop, heartbeat: HeartbeatWriter) -> None:
    """Loads, listens, writes the cluster file when all ranks are ready, and runs the step loop until it ends."""
    cpus = config.parallel.cpus or host.allowed_cpus()
    ops = open_ops(config)
    kernels = ops.name
    torch.set_num_threads(config.parallel.threads if kernels == "reference" else 1)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"loading {config.model.name}")) if world.rank == 0 else None
        loaded = load_engine(
            config,
            ops,
            world.groups["tp"],
            world.channel,
            _ranks_on_node(config, world, backend),
            progress,
            world.barrier,
        )
    facts = _facts(config, world, loaded, kernels, backend.device_name())
    inspection = Inspection(config.model, loaded.model, kernels, loaded.core.sampler.masks.summary)
    experts = loaded.model.expert_loads if loaded.model.holding.shard.rank == 0 else tuple
    server = RankServer(loaded.core, facts, config, stop.fail, inspection.answer, cpus, experts)
    loaded.core.on_outputs = server.deliver
    address = server.start()
    _log_ready(config, world, loaded, kernels)
    infos = world.gather(json.dumps(asdict(RankInfo(world.rank, os.getpid(), facts.host, address))).encode())
    _mark_operations(loaded.core, heartbeat)
    stop.core = loaded.core
    loaded.core.loop_progress.within_step = lambda: loaded.progress
    heartbeat.serve(loaded.core)
    ended, interval = threading.Event(), config.model.rebalance_experts_s
    if interval and world.rank == 0:
        arguments = loaded.core.rebalance_experts, interval, ended
        threading.Thread(target=rebalance_regularly, args=arguments, name="rebalance", daemon=True).start()
    if world.rank == 0:
        info = _cluster_info(config, facts, infos)
        write_cluster(Path(config.service.run_dir), info)
    try:
        loaded.core.run()
    except BaseException as error:
        stop.exit_report.write(error)  # reported while the streams still carry it to the clients
        raise
    finally:
        ended.set()
        heartbeat.end()
        stop.begin("the end of the step loop")
        server.stop()
    if world.rank == 0 and not config.service.supervisor_pid:
        write_cluster(Path(config.service.run_dir), _cluster_info(config, facts, infos, "stopped"))
    world.close()
    stop.done()


class Stop:
    """The ways in which a rank is made to end: SIGTERM (requests that run get `drain_s` seconds to finish), SIGINT or
    another SIGTERM (they get none), a supervisor that is gone, a service that broke."""

    def __init__(self, exit_report: host.ExitReport, drain_s: float) -> None:
        self.core: EngineCore | None = None
        """Set once the step loop is about to run; before that a signal ends the process at once."""
        self.exit_report = exit_report
        self._drain_s = drain_s
        self._is_draining = False
        self._timer: threading.Timer | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def watch_supervisor(self, pid: int) -> None:
        if pid:
            host.watch_process(pid, lambda: self.fail(Unavailable(f"the supervisor (pid {pid}) is gone")))

    def fail(self, error: BaseException) -> None:
        """Ends this process now, from any thread; mpirun ends its peers."""
        self.exit_report.write(error)
        os._exit(1)

    def begin(self, why: str, limit_s: float = STOP_LIMIT_S) -> None:
        """From now on there are `limit_s` seconds until `done`, or until the next call of this."""
        self.done()
        late = Unavailable(f"{why}: this rank did not end in order within {limit_s:g} s")
        self._timer = threading.Timer(limit_s, self.fail, (late,))
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        core = self.core
        if core is None:
            raise Unavailable(f"stopped by {name} before it was ready")
        if number == signal.SIGTERM and self._drain_s and not self._is_draining:
            self._is_draining = True
            self.begin(name, self._drain_s + STOP_LIMIT_S)
            if core.is_leader:  # the others end with it
                threading.Thread(target=self._drain, args=(core,), name="drain", daemon=True).start()
        else:
            self.begin(name)
            core.shutdown()

    def _drain(self, core: EngineCore) -> None:
        """Lets nothing in, waits for what runs, ends the loop."""
        deadline = time.monotonic() + self._drain_s
        while (left := deadline - time.monotonic()) > 0:
            counted = core.statistics()
            if open_requests := counted.running + counted.waiting:
                logger.info("draining: %d requests still run, %.0f s left", open_requests, left)
            with contextlib.suppress(DeadlineExceeded):  # then this is said once more
                core.stop_model(min(left, DRAIN_WORD_S), "the server is shutting down")
                break
        core.shutdown()


def _prepare_process(config: WorkerConfig, rank: int) -> None:
    replica = config.service.replica
    name = f"rank {rank}" if replica < 0 else f"replica {replica}, rank {rank}"
    logs.configure(name)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    keep_freed_memory()
    host.run_on(config.parallel.cpus)
    _bind_memory(config.parallel.memory_node)
    allowed = host.allowed_cpus()
    if allowed and len(allowed) < config.parallel.threads:
        logger.warning(
            "%d threads on the %d processors that this rank may use; if mpirun binds it, add --bind-to none",
            config.parallel.threads,
            len(allowed),
        )


def _bind_memory(node: int) -> None:
    """Before anything large is taken. Where it cannot be, pages lie where the rank's threads first touch them."""
    if node < 0 or num_memory_nodes() == 1:
        return
    try:
        host.bind_memory(node)
        logger.info("memory is bound to NUMA node %d", node)
    except Unavailable as error:
        logger.warning(
            "memory cannot be bound to NUMA node %d (%s): pages lie where they are first touched, on another node once "
            "this one is full",
            node,
            error.message,
        )


def _mark_operations(core: EngineCore, heartbeat: HeartbeatWriter) -> None:
    """Weights are given back and read again on the loop's thread, for as long as a start may take."""
    operate = core.operations.on_operation

    def marked(operation: Operation, argument: bytes) -> None:
        with heartbeat.loading():
            operate(operation, argument)

    core.operations.on_operation = marked


def _prepare_run_dir(config: WorkerConfig, rank: int) -> HeartbeatWriter:
    """The rank's heartbeat, begun. Raises ConfigError when the folder cannot be used, or its path is too long for a
    socket."""
    listen_target(config, rank)
    run_dir = Path(config.service.run_dir)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        error_file(run_dir, rank, config.service.epoch).unlink(missing_ok=True)
        return HeartbeatWriter(heartbeat_file(run_dir, rank, config.service.epoch))
    except OSError as error:
        raise ConfigError(f"service.run_dir {run_dir} cannot be used: {error}") from error


def _ranks_on_node(config: WorkerConfig, world: World, backend: Backend) -> int:
    """How many ranks share the memory that this rank takes from."""
    if memory := backend.memory_name():
        own = zlib.crc32(memory.encode())
        return world.all_values(own).count(own)
    if config.parallel.ranks_on_node:
        return config.parallel.ranks_on_node
    place_name = ":".join((host.host_name(), *host.memory_nodes(config.parallel.cpus)))
    mine = zlib.crc32(place_name.encode())
    return world.all_values(mine).count(mine)


def _facts(config: WorkerConfig, world: World, loaded: LoadedEngine, kernels: str, device: str) -> RankFacts:
    limits = loaded.core.limits
    cpus = config.parallel.cpus or host.allowed_cpus()
    return RankFacts(
        rank=world.rank,
        world_size=world.size,
        host=host.host_name(),
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        kernels=kernels,
        device=device,
        numa_nodes=",".join(name.removeprefix("node") for name in host.memory_nodes(cpus)),
        threads=config.parallel.threads,
        load_s=loaded.load_s,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=loaded.kv_bytes,
        prompt_lengths=limits.row_inputs.prompt_lengths,
    )


def _cluster_info(config: WorkerConfig, facts: RankFacts, infos: list[bytes], state: str = "ready") -> ClusterInfo:
    return ClusterInfo(
        epoch=config.service.epoch,
        state=state,
        model=config.model.name,
        model_path=config.model.path,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        watchdog_timeout=config.service.watchdog_timeout,
        supervisor_pid=config.service.supervisor_pid,
        tls=config.service.tls,
        adapters=tuple(module.loaded() for module in parse_modules(config.adapters, (config.model.name,))),
        lora_dir=config.adapters.lora_dir,
        ranks=tuple(RankInfo(**json.loads(info)) for info in infos),
    )


def _log_ready(config: WorkerConfig, world: World, loaded: LoadedEngine, kernels: str) -> None:
    limits = loaded.core.limits
    tokens = min(limits.context_tokens([group.num_pages for group in limits.groups()])) * limits.attention_ranks
    logger.info(
        "allspan %s, rank %d of %d on %s: kernels %s, threads %d, collectives %s, weights %.1f MiB in %.1f s; "
        "KV cache size: %s tokens, maximum concurrency for %s tokens per request: %.2fx",
        allspan.__version__,
        world.rank,
        world.size,
        host.host_name(),
        kernels,
        config.parallel.threads,
        world.kind,
        loaded.weight_bytes / 2**20,
        loaded.load_s,
        f"{tokens:,}",
        f"{limits.max_model_len:,}",
        tokens / limits.max_model_len,
    )
