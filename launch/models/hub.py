"""The settings for models of a Hugging Face hub: a revision, and the token for models that need one."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from allspan.launch.secrets import HUB_TOKENS, hide_keys
from allspan.protos.api.errors import ConfigError

_REVISION = re.compile(r"\w[\w.-]*(/[\w.-]+)*")
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class HubConfig:
    """The settings for fetching ORG/NAME."""

    revision: str = ""
    """Takes this branch, tag or commit of ORG/NAME, kept beside others; empty takes the main branch."""
    hf_token: str = field(default="", repr=False)
    """Sets the token for models of the hub that need one. --hf-token-file or the variable HF_TOKEN is safer."""
    hf_token_file: str = ""
    """Reads that token from a file."""


NO_HUB = HubConfig()


def check_hub(config: HubConfig, is_hub_name: bool, model: str) -> None:
    """Raises ConfigError for a revision of what is no hub's model, and for one that cannot be a revision."""
    if not config.revision:
        return
    if not is_hub_name:
        raise ConfigError(f"--revision is {config.revision!r}, but {model!r} is not ORG/NAME of a hub")
    if not _REVISION.fullmatch(config.revision) or ".." in config.revision:
        raise ConfigError(f"--revision is {config.revision!r}, must be a branch, a tag or a commit")


def take_token(config: HubConfig, environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Returns the token from the flag, the file or a variable; None leaves it to what huggingface_hub has stored.

    No process that is started later inherits the variables, and `ps` does not show the flag's value.
    """
    given = [token for name in HUB_TOKENS if (token := environ.pop(name, "").strip())]
    if config.hf_token or given:
        hide_keys()
    if config.hf_token:
        return _checked("--hf-token", config.hf_token)
    if config.hf_token_file:
        try:
            text = Path(config.hf_token_file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--hf-token-file {config.hf_token_file} cannot be read: {error}") from None
        return _checked(f"--hf-token-file {config.hf_token_file}", text.strip())
    return given[0] if given else None


def _checked(source: str, token: str) -> str:
    """The error names the source and never the token."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{source} holds no token: it must be one word of ASCII characters")
    return token
