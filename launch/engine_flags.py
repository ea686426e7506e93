"""The flags for an engine and for sampling that `generate`, `chat` and `bench` share, and the engine that they
describe."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from allspan.client.engine import ClientEngine
from allspan.launch.models.checkpoint_files import check_files
from allspan.launch.models.find_model import FoundModel, resolve_model
from allspan.launch.models.hub import HubConfig
from allspan.launch.placement.placement import PlacementConfig
from allspan.launch.settings import add_cluster_options, add_model
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.flags import Parser, add_options, build
from allspan.protos.config.generation import GenerationConfig
from allspan.protos.config.settings import AdapterConfig, CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from allspan.protos.text import sampling_defaults

_CONFIGS = (PlacementConfig, ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, AdapterConfig)


def add_engine_options(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--attach",
        metavar="URL",
        help="Uses what runs already: a server (http://HOST:PORT, grpc://HOST:PORT; https and grpcs with TLS), or a "
        "cluster by its run directory or its ranks' addresses.",
    )
    parser.add_argument("--quiet", action="store_true", help="Keeps the cluster's log off standard error.")
    add_cluster_options(parser)


def add_sampling_options(parser: Parser) -> None:
    """The fields of SamplingParams, and where the defaults of those that are not given come from."""
    group = parser.group("sampling", "how tokens are chosen; what is not given is the model's own default")
    add_options(
        group, SamplingParams, skip=("stop", "logit_bias", "bad_words_ids", "stop_words_ids", "grammar"), optional=True
    )
    add_options(group, GenerationConfig)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="Ends the output before this text; the flag may be repeated."
    )


def sampling_params(namespace: argparse.Namespace, model_path: str | None, max_tokens: int) -> SamplingParams:
    """Flags, then the model's defaults, then `max_tokens` and SamplingParams' defaults. Raises InvalidRequest,
    CheckpointError, ConfigError."""
    config = build(GenerationConfig, namespace)
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    given = {name: value for name in names if (value := getattr(namespace, name, None)) is not None}
    values = sampling_defaults(model_path, config=config).under(given) if model_path is not None else given
    return SamplingParams(**({"max_tokens": max_tokens} | values))


def local_model(namespace: argparse.Namespace) -> FoundModel | None:
    """The model to start a cluster for, fetched if need be and its files checked; None when attaching to one."""
    if namespace.attach:
        return None
    model = resolve_model(namespace.model, build(HubConfig, namespace))
    check_files(model.path, namespace.load_format != "dummy")
    return model


def open_engine(namespace: argparse.Namespace, model: FoundModel | None) -> ClientEngine:
    """Starts a cluster for `model` (and waits until it is ready), or attaches."""
    if model is None:
        addresses = namespace.attach.split(",")
        return ClientEngine(attach=addresses if len(addresses) > 1 else addresses[0])
    options = serve_options(namespace) | {"served_model_name": model.name, "no_restart": True}
    return ClientEngine(model.path, quiet=namespace.quiet, **options)


def serve_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The flags of `allspan serve` that differ from their defaults, by field name."""
    defaults: dict[str, Any] = {}
    for cls in reversed(_CONFIGS):  # where two have a field of one name, the first one's is the flag
        defaults |= {field.name: field.default for field in dataclasses.fields(cls)}
    given = vars(namespace)
    return {name: given[name] for name, default in defaults.items() if name in given and given[name] != default}
