"""What every route of the gateway works with."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.client.gateway.admission.admission import Submitter
from allspan.client.gateway.auth.keys import Keys, load_keys
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.client.gateway.served_model import ServedModel
from allspan.client.gateway.snapshot_cache import Glance
from allspan.protos.text import Tokenizer


@dataclass(frozen=True)
class Front:
    """Handed to each maker of routes (`http.ROUTES`)."""

    submitter: Submitter
    config: GatewayConfig
    keys: Keys
    glance: Glance

    @classmethod
    def of(cls, engine: GatewayEngine, tokenizer: Tokenizer, config: GatewayConfig) -> Front:
        """Over one engine. Raises ConfigError for keys that are none, CheckpointError."""
        submitter = Submitter(engine, tokenizer, ServedModel.of(engine.cluster, config), config)
        return cls(submitter, config, load_keys(config.security), Glance(engine))
