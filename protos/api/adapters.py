"""LoRA adapters as callers and ranks name them: a name, a folder, and a number for each time that one is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allspan.protos.api.errors import AdapterNotFound

MAX_NAME_CHARS = 128
NO_ADAPTER = -1
"""Stands for an adapter's digest in a request without one."""
DIGEST_BYTES = 6


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One adapter: the name that requests use, and its folder in PEFT's format."""

    name: str
    path: str
    base_model_name: str = ""
    """The model that /v1/models tells as its parent; "": the one that is served."""
    digest: int = 0
    """Names this load of it to the ranks, and is in the keys of its cached pages: 48 bits that no other load has. 0: it
    has not been loaded."""

    def loaded(self, nonce: bytes = b"") -> AdapterModule:
        """Returns it with its digest (BLAKE2b, RFC 7693). Loads at a start need no `nonce`: all ranks and replicas, and
        later worlds, give them equal digests."""
        data = repr((self.name, self.path, self.base_model_name)).encode() + nonce
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest(), "little")
        return replace(self, digest=digest)


def find_adapter(name: str, served: Iterable[AdapterModule]) -> int:
    """Returns the digest of the adapter of this name; NO_ADAPTER for "", which is none. Raises AdapterNotFound for an
    unknown name."""
    if not name:
        return NO_ADAPTER
    adapters = tuple(served)
    for adapter in adapters:
        if adapter.name == name:
            return adapter.digest
    raise unknown_adapter(name, [adapter.name for adapter in adapters])


def lost_adapter(name: str) -> AdapterNotFound:
    """Returns the error for an adapter that was there when a request came."""
    return AdapterNotFound(
        f"adapter is {name[:MAX_NAME_CHARS]!r}, which was unloaded just now, or could not be loaded again: load it, "
        "then send the request again"
    )


def unknown_adapter(name: str, served: Sequence[str]) -> AdapterNotFound:
    """Returns the error for a name that none of the adapters has."""
    known = f"the adapters are {', '.join(map(repr, served))}" if served else "no adapters are served"
    return AdapterNotFound(f"adapter is {name[:MAX_NAME_CHARS]!r}, which is not served here; {known}")
