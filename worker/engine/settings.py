"""The settings that `Engine` takes, those of a worker without a launcher, and where it finds a model."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import ConfigError, ModelNotFound
from allspan.protos.config.config_json import from_json
from allspan.protos.config.home import models_dir
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    EngineOptions,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from allspan.protos.config.speculation import with_draft_model


class EngineSettings(EngineOptions, total=False):
    """The keyword arguments of `Engine`: the options of both engines, and where this process computes."""

    cpus: tuple[int, ...]
    oversubscribed: bool
    ranks_on_node: int
    memory_node: int


_GROUPS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "adapters": AdapterConfig,
}


def find_model(model: str | Path) -> tuple[str, Path]:
    """A model's name and path: a path that exists, else the name of a model that was pulled. Raises ModelNotFound."""
    wanted, folder = str(model), models_dir()
    try:
        found = _find(wanted, folder)
    except (OSError, RuntimeError, ValueError) as error:  # no file system takes such a name, or there is no such home
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(
            f"model {wanted[:64]!r} ({len(wanted)} characters) cannot be looked for: {reason}"
        ) from None
    if found is None:
        raise ModelNotFound(
            f"model {wanted!r} is neither a file or folder nor a model in {folder}; `allspan pull {wanted}` fetches one"
        )
    return found


def _find(wanted: str, folder: Path) -> tuple[str, Path] | None:
    path = Path(wanted).expanduser()
    if wanted and path.exists():
        path = path.resolve()
        return (path.name if path.is_dir() else path.stem), path
    for file in sorted(folder.glob("*.gguf")):
        if file.stem.lower() == wanted.lower():
            return file.stem, file
    if wanted and not path.is_absolute() and ".." not in path.parts and (folder / wanted / "config.json").is_file():
        return wanted, folder / wanted
    return None


def worker_config(model: str | Path, settings: Mapping[str, Any]) -> WorkerConfig:
    """The configuration of a world of one rank. Raises ConfigError, naming the setting, or ModelNotFound."""
    groups: dict[str, dict[str, Any]] = {name: {} for name in (*_GROUPS, "service")}
    known = {field.name: name for name, cls in _GROUPS.items() for field in fields(cls)}
    known["watchdog_timeout"] = "service"
    for key in ("path", "name"):
        del known[key]
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {key!r}; {hint}")
        groups[known[key]][key] = value
    name, path = find_model(model)
    groups["model"] |= {"path": str(path), "name": name}
    if isinstance(text := groups["scheduler"].get("speculative_config"), str):
        groups["scheduler"]["speculative_config"] = with_draft_model(text, lambda draft: str(find_model(draft)[1]))
    groups["parallel"].setdefault("threads", _processors())
    groups["service"]["run_dir"] = "(in process)"
    try:
        return from_json(json.dumps(groups))
    except TypeError as error:
        raise ConfigError(f"a setting is of a kind that cannot be used: {error}") from None


def _processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
