"""allspan: large language models served from a cluster of processes behind one client.

The public face is lazy: `from allspan import ClientEngine` imports neither torch nor MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allspan.client.engine import ClientEngine
    from allspan.protos.api.engine import EngineProtocol
    from allspan.protos.api.grammar import Grammar
    from allspan.protos.api.options import RequestOptions
    from allspan.protos.api.sampling import SamplingParams
    from allspan.protos.cluster.tls import TlsFiles
    from allspan.worker.engine.engine import Engine

    _ENGINES: tuple[type[EngineProtocol], ...] = (ClientEngine, Engine)
    """For the type checker: both have every method of the protocol."""

__all__ = ["ClientEngine", "Engine", "Grammar", "RequestOptions", "SamplingParams", "TlsFiles", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "ClientEngine": "allspan.client.engine",
    "Engine": "allspan.worker.engine.engine",
    "Grammar": "allspan.protos.api.grammar",
    "RequestOptions": "allspan.protos.api.options",
    "SamplingParams": "allspan.protos.api.sampling",
    "TlsFiles": "allspan.protos.cluster.tls",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'allspan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
