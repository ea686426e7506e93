"""Keys given by variable or on the command line: taken in, and taken out of where others could read them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path

from allspan.client.gateway.auth.keys import load_keys
from allspan.client.gateway.config import GatewayConfig
from allspan.launch.console import say
from allspan.protos.api.errors import ConfigError

API_KEYS = ("ALLSPAN_API_KEY", "ALLSPAN_API_KEYS")
ADMIN_KEY = "ALLSPAN_ADMIN_API_KEY"
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
FLAGS = ("--api-key", "--admin-api-key", "--hf-token")

_ARGUMENTS, _VARIABLES = (45, 46), (47, 48)  # first and last byte's places in /proc/PID/stat, after the command's name


def take_secrets(config: GatewayConfig, environ: MutableMapping[str, str] = os.environ) -> GatewayConfig:
    """The configuration with the keys that variables hold, which no process that is started later inherits. ConfigError
    for whatever is no key."""
    security = config.security
    if security.api_key is not None or security.admin_api_key is not None:
        say(
            "others on this machine may have seen the value of --api-key or --admin-api-key; a file or a variable "
            "keeps a key secret"
        )
    for name in API_KEYS:
        if (keys := environ.pop(name, None)) is not None:
            security = replace(security, api_key=(*(security.api_key or ()), *_several(name, keys)))
    if (admin := environ.pop(ADMIN_KEY, None)) is not None:
        if security.admin_api_key not in (None, admin):
            raise ConfigError(f"{ADMIN_KEY} and --admin-api-key are two different keys, must be one")
        security = replace(security, admin_api_key=admin)
    hide_keys()
    load_keys(security)
    return replace(config, security=security)


def _several(name: str, text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    if not keys:
        raise ConfigError(f"{name} is set and empty, must hold a key; unset it to do without")
    return keys


def hide_keys() -> None:
    """Overwrites keys where `ps` and /proc show this process's command line and first environment."""
    if not Path("/proc/self/stat").exists():  # not Linux: there is no way
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for first, last in (_ARGUMENTS, _VARIABLES):
        start, end = int(fields[first]), int(fields[last])
        if start and end > start:
            for offset, length in secret_spans(ctypes.string_at(start, end - start)):
                ctypes.memset(start + offset, ord("x"), length)


def secret_spans(area: bytes) -> Iterator[tuple[int, int]]:
    """(offset, length) of each key in words that end with a zero byte."""
    named = tuple(f"{name}=".encode() for name in (*FLAGS, *API_KEYS, ADMIN_KEY, *HUB_TOKENS))
    offset, follows = 0, False
    for word in area.split(b"\0"):
        if follows:
            yield offset, len(word)
        elif word.startswith(named):
            name = word.index(b"=") + 1
            yield offset + name, len(word) - name
        follows = word.decode("utf-8", "replace") in FLAGS
        offset += len(word) + 1
