"""The objects that the parts of the gateway share: every route and gRPC method is made with them."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.client.gateway.admission.admission import Admission
from allspan.client.gateway.admission.prompts import PromptEncoder
from allspan.client.gateway.admission.validation import SamplingValidator
from allspan.client.gateway.auth.keys import Keys, load_keys
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.engine_protocol import GatewayEngine
from allspan.client.gateway.served_model import ServedModel
from allspan.client.gateway.snapshot_cache import SnapshotCache
from allspan.client.gateway.telemetry.recorder import Telemetry
from allspan.client.gateway.telemetry.traces import open_traces
from allspan.protos.text import SamplingDefaults, Tokenizer


@dataclass(frozen=True)
class GatewayContext:
    """The objects of one running gateway."""

    engine: GatewayEngine
    tokenizer: Tokenizer
    model: ServedModel
    config: GatewayConfig
    keys: Keys
    telemetry: Telemetry
    prompts: PromptEncoder
    sampling: SamplingValidator
    admission: Admission
    snapshots: SnapshotCache

    @classmethod
    def of(
        cls,
        engine: GatewayEngine,
        tokenizer: Tokenizer,
        config: GatewayConfig,
        defaults: SamplingDefaults | None = None,
    ) -> GatewayContext:
        """Makes them for one engine. Raises ConfigError for keys that are none, CheckpointError."""
        model = ServedModel.of(engine.cluster, config, defaults, lambda: engine.cluster.adapters)
        keys = load_keys(config.security)
        telemetry = Telemetry(model.name, open_traces(config.otlp_traces_endpoint), keys.hide)
        return cls(
            engine=engine,
            tokenizer=tokenizer,
            model=model,
            config=config,
            keys=keys,
            telemetry=telemetry,
            prompts=PromptEncoder(tokenizer, model, config),
            sampling=SamplingValidator(tokenizer, model, config.limits),
            admission=Admission(engine, tokenizer, model, config.limits, telemetry, config.security.share_prefix_cache),
            snapshots=SnapshotCache(engine),
        )
