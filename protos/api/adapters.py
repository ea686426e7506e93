"""LoRA adapters as callers and ranks name them: a name, a folder, and the slot in which every rank holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allspan.protos.api.errors import AdapterNotFound

MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One adapter: the name that requests use, and its folder in PEFT's format."""

    name: str
    path: str
    base_model_name: str = ""
    """The model that /v1/models tells as its parent; "": the one that is served."""


def adapter_slot(name: str, served: Sequence[str]) -> int:
    """The slot of the adapter of this name: its place in `served`, the names in the order of the slots; -1 for "",
    which is no adapter. Raises AdapterNotFound for an unknown name."""
    if not name:
        return -1
    try:
        return served.index(name)
    except ValueError:
        known = f"the adapters are {', '.join(map(repr, served))}" if served else "no adapters are served"
        raise AdapterNotFound(f"adapter is {name[:MAX_NAME_CHARS]!r}, which is not served here; {known}") from None
