"""The launcher's flags: which dataclasses each command takes, and other spellings of their names."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields

from allspan.client.gateway.config import GROUPS, GatewayConfig
from allspan.launch.hosts.host_list import HostsConfig
from allspan.launch.logs import LogConfig
from allspan.launch.models.find_model import DEFAULT_MODEL
from allspan.launch.models.hub import NO_HUB, HubConfig
from allspan.launch.placement.placement import PlacementConfig
from allspan.launch.supervision.rank_endpoints import WireConfig
from allspan.launch.supervision.supervisor import SupervisorConfig
from allspan.protos.config.flags import Parser, add_options, build
from allspan.protos.config.settings import (
    CHOICES,
    HELD_FIELDS,
    LIMITS,
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)

ALIASES: dict[str, tuple[str, ...]] = {
    "ranks": ("-tp", "--tensor-parallel-size"),
    "data_parallel_size": ("-dp",),
    "pipeline_parallel_size": ("-pp",),
    "max_model_len": ("--context-length",),
    "max_num_seqs": ("--max-running-requests",),
    "max_num_batched_tokens": ("--chunked-prefill-size",),
    "kv_cache_bytes": ("--kv-cache-memory-bytes",),
}

_CHOICES: dict[str, tuple[str | int, ...]] = CHOICES | {"ssl_cert_reqs": (0, 1, 2)}

_LIMITS: dict[str, tuple[float, float]] = LIMITS | {
    "ranks": (0, 1024),
    "data_parallel_size": (1, 100),
    "start_timeout_s": (1, 86400),
    "max_failures": (1, 1000),
    "failure_window_s": (1, 86400),
    "resume_timeout": (0, 86400),
    "link_latency_us": (0, 1e6),
    "link_gbits": (0.001, 1e5),
    "attach_timeout": (1, 86400),
    "parent_pid": (0, 2**31 - 1),
    "port": (0, 65535),
    "grpc_port": (0, 65535),
    "worker_port": (0, 65535),
    "host_timeout": (1, 3600),
    "rank_port": (0, 65535 - 1024),
    "max_body_bytes": (1024, 2**31),
    "max_prompt_chars": (0, 2**31),
    "max_concurrent_requests": (1, 1 << 20),
    "kv_events_buffer_steps": (0, 1 << 24),
    "grpc_max_message_bytes": (1024, 2**30),
    "grpc_min_ping_interval": (0, 86400),
    "grpc_keepalive_time": (1, 86400),
    "grpc_max_connection_age": (0, 2**31 // 1000),
    "grpc_stream_timeout": (0.1, 86400),
    "body_timeout": (0.1, 3600),
    "header_timeout": (0.1, 3600),
    "write_timeout": (0.1, 3600),
    "keep_alive_timeout": (1, 3600),
    "max_connections": (1, 1 << 20),
    "max_header_bytes": (1024, 1 << 20),
}


@dataclass(frozen=True)
class ResumeConfig:
    """The gateway's handling of requests whose ranks failed."""

    resume: bool = True
    """Continues requests on another replica, or on the restarted ranks, when theirs die."""
    resume_timeout: float = 30.0
    """Sets the seconds that such a request waits for ranks that are ready."""


@dataclass(frozen=True)
class ServeSettings:
    """The settings of `allspan serve`, a dataclass for each concern."""

    model: str
    placement: PlacementConfig
    weights: ModelConfig
    """`path` and `name` are empty until the model is found."""
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    supervisor: SupervisorConfig
    gateway: GatewayConfig | None
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    served_model_name: tuple[str, ...] = ()
    """The names that requests use, with a gateway or without; empty: the model's own."""
    shutdown_timeout: float = 5.0
    """Seconds that running requests get to finish, with a gateway or without."""
    resume: ResumeConfig = ResumeConfig()
    hosts: HostsConfig = field(default_factory=HostsConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hub: HubConfig = NO_HUB
    given: str = ""
    """Returns the settings that differ from their defaults, for the log."""


def add_model(parser: Parser, grouped: bool = True) -> None:
    """Adds the model and, as a group or not, the flags for one that is fetched from a hub."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"Names the model: a folder, a GGUF file, a short name, or ORG/NAME (default: {DEFAULT_MODEL}).",
    )
    add_hub(parser.group("hub", "models from a Hugging Face hub") if grouped else parser)


def add_hub(parser: argparse._ActionsContainer) -> None:
    """Adds the flags for models that are fetched from a hub."""
    add_flags(parser, HubConfig)


def add_weights(parser: argparse._ActionsContainer) -> None:
    """Adds the flags for the form in which weights are held."""
    add_flags(
        parser, ModelConfig, skip=tuple(entry.name for entry in fields(ModelConfig) if entry.name not in HELD_FIELDS)
    )


def add_cluster_options(parser: Parser) -> None:
    """Adds the flags of every command that starts a cluster."""
    ranks = parser.group("ranks", "processes, processors and GPUs")
    add_flags(ranks, PlacementConfig, skip=("stages",))
    add_flags(ranks, ParallelConfig, skip=("threads", "cpus", "memory_node", "oversubscribed", "ranks_on_node"))
    model = parser.group("model", "weights and context")
    add_weights(model)
    add_flags(model, ModelConfig, skip=("path", "name", *HELD_FIELDS))
    model.add_argument(
        "--random-weights",
        dest="load_format",
        action="store_const",
        const="dummy",
        help="Fills the weights of a folder with a config.json with random numbers, as --load-format dummy does.",
    )
    add_flags(parser.group("cache", "the KV cache"), CacheConfig)
    add_flags(parser.group("scheduler", "what a step may hold"), SchedulerConfig)
    add_flags(parser.group("adapters", "LoRA adapters"), AdapterConfig)


def serve_parser() -> Parser:
    parser = Parser("allspan serve", "Serves a model from a cluster of ranks, over HTTP (OpenAI's API) and gRPC.")
    add_model(parser)
    add_cluster_options(parser)
    gateway = parser.group("gateway", "where HTTP and gRPC are served")
    add_flags(gateway, GatewayConfig, skip=tuple(GROUPS))
    for name, (title, group) in GROUPS.items():
        add_flags(parser.group(name, title), group)
    gateway.add_argument(
        "--gateway",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Serves HTTP and gRPC; --no-gateway prints `ALLSPAN READY {…}` with the run directory instead.",
    )
    add_flags(parser.group("hosts", "ranks on several hosts"), HostsConfig)
    add_flags(parser.group("wire", "how clients reach the ranks"), WireConfig)
    add_flags(parser.group("logging", "lines on standard error"), LogConfig)
    failures = parser.group("failures", "when ranks die or do not answer")
    add_flags(failures, ResumeConfig)
    add_flags(failures, SupervisorConfig)
    parser.add_config()
    return parser


def serve_settings(namespace: argparse.Namespace) -> ServeSettings:
    load = namespace.expert_load and os.path.abspath(namespace.expert_load)  # ranks run in another folder
    return ServeSettings(
        model=namespace.model,
        placement=build(PlacementConfig, namespace, stages=namespace.pipeline_parallel_size),
        weights=build(ModelConfig, namespace, path="", name="", expert_load=load),
        cache=build(CacheConfig, namespace),
        scheduler=build(SchedulerConfig, namespace),
        # The launcher's `threads` 0 means "decide"; each rank gets its own number.
        parallel=build(ParallelConfig, namespace, threads=1),
        supervisor=build(SupervisorConfig, namespace),
        gateway=gateway_config(namespace) if namespace.gateway else None,
        adapters=build(AdapterConfig, namespace),
        served_model_name=namespace.served_model_name,
        shutdown_timeout=namespace.shutdown_timeout,
        resume=build(ResumeConfig, namespace),
        hosts=build(HostsConfig, namespace),
        wire=build(WireConfig, namespace),
        log=build(LogConfig, namespace),
        hub=build(HubConfig, namespace),
    )


def gateway_config(namespace: argparse.Namespace) -> GatewayConfig:
    """Returns the settings of a gateway from its flags."""
    return build(GatewayConfig, namespace, **{name: build(group, namespace) for name, (_, group) in GROUPS.items()})


def add_flags(parser: argparse._ActionsContainer, cls: type, skip: tuple[str, ...] = ()) -> None:
    """Adds the flags of one dataclass, with their other spellings, choices and limits."""
    add_options(parser, cls, skip, ALIASES, _CHOICES, _LIMITS)
