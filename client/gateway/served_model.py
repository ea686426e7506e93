"""What the gateway says of its model, and fills requests up with."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from allspan import __version__
from allspan.client.gateway.config import GatewayConfig
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.text import GenerationDefaults, generation_defaults


@dataclass(frozen=True)
class ServedModel:
    """The one model behind the gateway."""

    name: str
    """That requests use."""
    root: str
    """Its own."""
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults
    created: int
    """Seconds since 1970."""
    fingerprint: str = ""
    """Another model, version or length has another."""

    @classmethod
    def of(cls, info: ClusterInfo, config: GatewayConfig) -> ServedModel:
        """From what a ready cluster says of itself and what its model's files recommend. CheckpointError."""
        known = (__version__, info.model, info.model_path, info.max_model_len, info.vocab_size)
        return cls(
            name=config.served_model_name or info.model,
            root=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            defaults=generation_defaults(info.model_path),
            created=int(time.time()),
            fingerprint=f"fp_{hashlib.sha256(repr(known).encode()).hexdigest()[:10]}",
        )
