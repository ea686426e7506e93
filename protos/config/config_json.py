"""WorkerConfig as JSON: the file that a launcher writes and every rank of a world reads.

    {"model": {…}, "service": {…}, "cache": {…}, "scheduler": {…}, "parallel": {…},
     "adapters": {…},
     "ranks": [{"threads": 4, "cpus": [0, 1, 2, 3]}, …]}

One object a concern, with the fields of `allspan.protos.config.settings` as keys; those with defaults may be missing.
`ranks` is optional: entry K holds what rank K has otherwise than "parallel" says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.hf_overrides import parse_overrides
from allspan.protos.config.settings import CHOICES, LIMITS, STEP_SIZES, ParallelConfig, WorkerConfig
from allspan.protos.config.speculation import speculation_of

T = TypeVar("T")

RANK_LIMITS = LIMITS | {"threads": (1, LIMITS["threads"][1])}
"""A launcher has decided what a rank reads."""


def to_json(config: WorkerConfig, ranks: Sequence[Mapping[str, Any]] = ()) -> str:
    """The file's text; `ranks` are the overrides of "parallel", one a rank."""
    values = asdict(config)
    if ranks:
        values["ranks"] = [dict(rank) for rank in ranks]
    return json.dumps(values, indent=1)


def from_json(text: str, rank: int = 0) -> WorkerConfig:
    """Returns the configuration of rank `rank` from its JSON text. Raises ConfigError naming a key that is unknown,
    missing, of a wrong kind or value."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the worker's configuration is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the worker's configuration must be an object, is {_shown(values)}")
    ranks = values.pop("ranks", [])
    config = _dataclass(WorkerConfig, values, "")
    if not isinstance(ranks, list) or (ranks and rank >= len(ranks)):
        raise ConfigError(f"ranks must be a list with an entry for each rank (this is rank {rank}), is {_shown(ranks)}")
    if ranks:
        _dataclass(ParallelConfig, ranks[rank], f"ranks[{rank}]")
        parallel = _dataclass(ParallelConfig, values.get("parallel", {}) | ranks[rank], "parallel")
        config = replace(config, parallel=parallel)
    return settled(check(config))


def settled(config: WorkerConfig) -> WorkerConfig:
    """Returns the configuration with the step sizes filled in that were left to the device."""
    rows, budget = STEP_SIZES[config.model.device]
    given = config.scheduler
    budget = given.max_num_batched_tokens or max(budget, given.max_num_seqs)
    rows = given.max_num_seqs or min(rows, budget)
    return replace(config, scheduler=replace(given, max_num_seqs=rows, max_num_batched_tokens=budget))


def check(config: WorkerConfig) -> WorkerConfig:
    """The same config; raises ConfigError naming the first field whose value cannot be."""
    for group in fields(config):
        for name, value in asdict(getattr(config, group.name)).items():
            _check_field(f"{group.name}.{name}", name, value)
    budget, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if 0 < budget < rows:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {budget}, must be at least max_num_seqs ({rows}): every running "
            "request may need a token in each step"
        )
    speculation_of(config)
    threads, cpus = config.parallel.threads, config.parallel.cpus
    if cpus and len(cpus) != threads:
        raise ConfigError(f"parallel.cpus has {len(cpus)} processors, must have {threads}, one a thread, or none")
    return config


def _check_field(key: str, name: str, value: Any) -> None:
    allowed = CHOICES.get(name)
    if allowed and value not in allowed:
        raise ConfigError(f"{key} is {_shown(value)}, must be one of {', '.join(map(str, allowed))}")
    limits = RANK_LIMITS.get(name)
    if limits and not limits[0] <= value <= limits[1]:
        raise ConfigError(f"{key} is {value}, must be from {limits[0]:.15g} to {limits[1]:.15g}")
    if name == "hf_overrides":
        parse_overrides(value)
    if name in ("path", "name", "run_dir") and not value:
        raise ConfigError(f"{key} is empty")


def _dataclass(cls: type[T], values: Any, where: str) -> T:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object, is {_shown(values)}")
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {_join(where, key)!r}; known are {', '.join(names)}")
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{_join(where, field.name)} is missing")
    return cls(**{key: _convert(hints[key], value, _join(where, key)) for key, value in values.items()})


def _convert(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind in (int, str, bool, float):
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise ConfigError(f"{where} is {_shown(value)}, must be of type {kind.__name__}")
        return value
    if get_args(kind)[0] is str:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where} is {_shown(value)}, must be a list of texts")
        return tuple(value)
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ConfigError(f"{where} is {_shown(value)}, must be a list of integers of at least 0")
    return tuple(value)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]
