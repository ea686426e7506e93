"""`--lora-modules`: the adapters that every rank loads with the model, as they are written and as values.

sql=/models/sql-lora
{"name": "sql", "path": "/models/sql-lora", "base_model_name": "qwen"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from allspan.protos.api.adapters import MAX_NAME_CHARS, AdapterModule
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import AdapterConfig

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter's folder, as PEFT writes them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS = ("name", "path", "base_model_name")


def parse_modules(config: AdapterConfig, model_names: Iterable[str] = ()) -> tuple[AdapterModule, ...]:
    """Returns the adapters in the order of their slots. Raises ConfigError for one that is written wrongly, a name that
    cannot be one, is given twice or is among `model_names`, and for --enable-lora without adapters."""
    modules = tuple(map(_parsed, config.lora_modules))
    if config.enable_lora and not modules:
        raise ConfigError("enable_lora is given without lora_modules: name the adapters that are to be loaded")
    seen: set[str] = set()
    for module in modules:
        name = module.name
        if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
            raise ConfigError(
                f"lora_modules names an adapter {name[:MAX_NAME_CHARS]!r}: a name must have letters, digits, '.', '_' "
                f"and '-' alone, begin with a letter or digit, and have at most {MAX_NAME_CHARS} characters"
            )
        if plain_name(name) in seen:
            raise ConfigError(f"lora_modules names {name!r} twice (upper and lower case are the same); choose another")
        seen.add(plain_name(name))
    check_names([module.name for module in modules], model_names)
    return modules


def check_names(names: Iterable[str], model_names: Iterable[str]) -> None:
    """Raises ConfigError for an adapter that is called as the model is, with or without its ORG/."""
    taken = {plain_name(part) for name in model_names for part in (name, name.rpartition("/")[2])}
    for name in names:
        if plain_name(name) in taken:
            raise ConfigError(f"lora_modules names an adapter {name!r}, which is the model's own name; choose another")


def checked_adapters(config: AdapterConfig, model_names: Iterable[str]) -> AdapterConfig:
    """The same with absolute paths, since ranks run in another folder. Raises ConfigError as `parse_modules` does, and
    for an adapter whose folder, or a file of it, is not there."""
    modules = [
        replace(module, path=str(Path(module.path).expanduser().absolute()))
        for module in parse_modules(config, model_names)
    ]
    _check_folders(modules)
    return replace(config, lora_modules=tuple(map(_written, modules)))


def _check_folders(modules: Sequence[AdapterModule]) -> None:
    for name, folder in ((module.name, Path(module.path)) for module in modules):
        if not folder.is_dir():
            raise ConfigError(f"lora_modules: the path of {name!r} is {str(folder)!r}, must be an existing folder")
        for file in FILES:
            if not (folder / file).is_file():
                raise ConfigError(f"lora_modules: the folder of {name!r}, {str(folder)!r}, has no {file}")


def split_modules(text: str) -> tuple[str, ...]:
    """The entries of a comma-separated list; commas in JSON objects separate none. Raises ConfigError for bad JSON."""
    entries: list[str] = []
    while text := text.lstrip(", "):
        end = _json_end(text) if text.startswith("{") else len(text.partition(",")[0])
        entries.append(text[:end].strip())
        text = text[end:]
    return tuple(entries)


def plain_name(name: str) -> str:
    """A model's or adapter's name as names are compared: in lower case, without Ollama's `:latest`."""
    return name.lower().removesuffix(":latest")


def _json_end(text: str) -> int:
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_modules has {text[:80]!r}, which is no JSON object: {error}") from None


def _parsed(entry: str) -> AdapterModule:
    if not entry.startswith("{"):
        name, _, path = entry.partition("=")
        values = {"name": name, "path": path}
    else:
        _json_end(entry)
        values = json.loads(entry)
        if unknown := [key for key in values if key not in _KEYS]:
            raise ConfigError(
                f"lora_modules has the key {unknown[0]!r} in {entry[:80]!r}; known are {', '.join(_KEYS)}"
            )
    given = [values.get(key) or "" for key in _KEYS]
    if not all(isinstance(value, str) for value in given) or not (given[0] and given[1]) or "\0" in given[1]:
        raise ConfigError(
            f'lora_modules has {entry[:80]!r}, must be NAME=PATH or {{"name": "NAME", "path": "PATH"}} with a folder'
        )
    return AdapterModule(*given)


def _written(module: AdapterModule) -> str:
    if not module.base_model_name:
        return f"{module.name}={module.path}"
    return json.dumps({key: getattr(module, key) for key in _KEYS})
