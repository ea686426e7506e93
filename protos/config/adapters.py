"""`--lora-modules`: the adapters that every rank loads with the model, as they are written and as values.

sql=/models/sql-lora
{"name": "sql", "path": "/models/sql-lora", "base_model_name": "qwen"}
"""

from __future__ import annotations

import json
import os
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
DEFAULT_SLOTS = 8
"""Slots where adapters may be loaded at run time and no number is given."""
_KEYS = ("name", "path", "base_model_name")


def parse_modules(config: AdapterConfig, model_names: Iterable[str] = ()) -> tuple[AdapterModule, ...]:
    """Returns the adapters in the order of their slots. Raises ConfigError for one that is written wrongly, a name that
    cannot be one, is given twice or is among `model_names`, and for more adapters than may be loaded."""
    modules = tuple(map(_parsed, config.lora_modules))
    seen: set[str] = set()
    for module in modules:
        name = module.name
        if problem := name_problem(name, ()):
            raise ConfigError(f"lora_modules names an adapter {problem}")
        for key in _KEYS[1:]:
            if problem := text_problem(getattr(module, key)):
                raise ConfigError(f"lora_modules: the {key} of {name!r} is {problem}")
        if plain_name(name) in seen:
            raise ConfigError(f"lora_modules names {name!r} twice (upper and lower case are the same); choose another")
        seen.add(plain_name(name))
    check_names([module.name for module in modules], model_names)
    _check_counts(config, len(modules))
    return modules


def most_slots(config: AdapterConfig) -> int:
    """Returns the number of adapter slots on the device; 0: requests take no adapters."""
    named = len(config.lora_modules)
    if config.max_loras:
        return config.max_loras
    if not (config.enable_lora or config.lora_dir or config.max_cpu_loras):
        return named
    return max(named, min(DEFAULT_SLOTS, config.max_cpu_loras or DEFAULT_SLOTS))


def most_adapters(config: AdapterConfig) -> int:
    """Returns the most adapters that are loaded at once."""
    return config.max_cpu_loras or max(most_slots(config), len(config.lora_modules))


def name_problem(name: str, model_names: Iterable[str]) -> str:
    """Returns what is wrong with an adapter's name, which begins with it; "" for nothing. It may not be the model's,
    with or without its ORG/."""
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        return (
            f"{name[:MAX_NAME_CHARS]!r}: a name must have letters, digits, '.', '_' and '-' alone, begin with a letter "
            f"or digit, and have at most {MAX_NAME_CHARS} characters"
        )
    taken = {plain_name(part) for model in model_names for part in (model, model.rpartition("/")[2])}
    return f"{name!r}, which is the model's own name; choose another" if plain_name(name) in taken else ""


def check_names(names: Iterable[str], model_names: Iterable[str]) -> None:
    """Raises ConfigError for an adapter that is called as the model is, with or without its ORG/."""
    model_names = tuple(model_names)
    for name in names:
        if problem := name_problem(name, model_names):
            raise ConfigError(f"lora_modules names an adapter {problem}")


def checked_adapters(config: AdapterConfig, model_names: Iterable[str]) -> AdapterConfig:
    """The same with absolute paths, since ranks run in another folder. Raises ConfigError as `parse_modules` does, and
    for an adapter whose folder, or a file of it, is not there."""
    modules = [
        replace(module, path=str(Path(module.path).expanduser().absolute()))
        for module in parse_modules(config, model_names)
    ]
    _check_folders(modules)
    lora_dir = Path(config.lora_dir).expanduser().absolute() if config.lora_dir else None
    if lora_dir is not None and not lora_dir.is_dir():
        raise ConfigError(f"lora_dir is {config.lora_dir!r}, must be an existing folder")
    if problem := text_problem(str(lora_dir or "")):
        raise ConfigError(f"lora_dir is {problem}")
    return replace(config, lora_modules=tuple(map(_written, modules)), lora_dir=str(lora_dir or ""))


def _check_counts(config: AdapterConfig, num_modules: int) -> None:
    slots, most = most_slots(config), most_adapters(config)
    if most < slots:
        raise ConfigError(f"max_cpu_loras is {most}, must be at least max_loras ({slots}): slots would stay empty")
    if num_modules > most:
        raise ConfigError(
            f"lora_modules names {num_modules} adapters, at most {most} (max_cpu_loras) are loaded at once"
        )


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


def expanded(path: str | Path) -> str:
    """Returns a path without a `~`. One with a NUL, which no user's name may have, is left to those who check paths."""
    text = str(path)
    return text if "\0" in text else os.path.expanduser(text)


def text_problem(text: str) -> str:
    """Returns why a text cannot be sent to the ranks, which begins with it; "" for nothing. Bytes of a path that are
    not UTF-8 are halves of surrogate pairs in a str (PEP 383)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[:200]!r}, which is not UTF-8 at character {error.start}: rename it, or give a link to it"
    return ""


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
    name, path, parent = given = [values.get(key) or "" for key in _KEYS]
    if not all(isinstance(value, str) for value in given) or not (name and path) or "\0" in path:
        raise ConfigError(
            f'lora_modules has {entry[:80]!r}, must be NAME=PATH or {{"name": "NAME", "path": "PATH"}} with a folder'
        )
    return AdapterModule(name, path, parent)


def _written(module: AdapterModule) -> str:
    if not module.base_model_name:
        return f"{module.name}={module.path}"
    return json.dumps({key: getattr(module, key) for key in _KEYS})
