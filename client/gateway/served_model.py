"""The served model: its name and sizes, and the defaults that requests are filled up with."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from allspan import __version__
from allspan.client.gateway.config import GatewayConfig
from allspan.protos.api.errors import ModelNotFound
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.text import GenerationDefaults, generation_defaults


@dataclass(frozen=True)
class ServedModel:
    """The one model behind the gateway."""

    name: str
    """The name that requests use."""
    root: str
    """The model's own name."""
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults
    created: int
    """Seconds since 1970."""
    fingerprint: str = ""
    """Differs for another model, version or length."""

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound for a name that is not the served one, whose case is free; "" is the served one."""
        if name and name.lower() != self.name.lower():
            raise ModelNotFound(f"model {name[:128]!r} is not served here, this server has {self.name!r}")

    @classmethod
    def of(cls, info: ClusterInfo, config: GatewayConfig) -> ServedModel:
        """Returns the model of a ready cluster, with the defaults that its files recommend. CheckpointError."""
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
