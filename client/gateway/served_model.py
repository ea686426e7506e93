"""The served model: its name and sizes, and the defaults that requests are filled up with."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from allspan import __version__
from allspan.client.gateway.config import GatewayConfig
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import ConfigError, InvalidRequest, ModelNotFound
from allspan.protos.api.options import RequestOptions
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.config.adapters import check_names, plain_name
from allspan.protos.embeddings.card import EmbeddingCard, embedding_card
from allspan.protos.embeddings.rerank import check_template
from allspan.protos.text import SamplingDefaults, sampling_defaults


@dataclass(frozen=True)
class ServedModel:
    """The one model behind the gateway."""

    name: str
    """The name that requests use and answers have."""
    root: str
    """The model's own name."""
    max_model_len: int
    vocab_size: int
    defaults: SamplingDefaults
    created: int
    """Seconds since 1970."""
    fingerprint: str = ""
    """Differs for another model, version or length."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use."""
    card: EmbeddingCard = field(default_factory=EmbeddingCard)
    """How it embeds and scores."""
    list_adapters: Callable[[], tuple[AdapterModule, ...]] = tuple
    """Tells the LoRA adapters that are loaded now."""

    @property
    def adapters(self) -> tuple[AdapterModule, ...]:
        """The LoRA adapters that requests may name in the place of the model."""
        return self.list_adapters()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that mean the model itself, `name` first."""
        return (self.name, *self.aliases)

    @property
    def all_names(self) -> tuple[str, ...]:
        """All names that requests may use: the model's, then the adapters'."""
        return (*self.names, *(adapter.name for adapter in self.adapters))

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The things that requests may ask of it."""
        return (
            *(("completion",) if self.card.generates else ()),
            "embedding",
            *(("rerank",) if self.card.head else ()),
        )

    def check_generates(self) -> None:
        """Raises InvalidRequest for a model that makes vectors alone."""
        if not self.card.generates:
            raise InvalidRequest(
                f"model {self.name!r} makes embeddings and generates no text: use /v1/embeddings", "model"
            )

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound for a name that is none of the served ones; "" is the model's."""
        if name:
            self.find_name(name)

    def adapter(self, name: str) -> str:
        """Returns the adapter that a request means which names this as its model; "" for the model itself.
        ModelNotFound for a name that is none of the served ones."""
        found = self.find_name(name) if name else self.name
        return "" if found in self.names else found

    def with_adapter(self, options: RequestOptions, name: str) -> RequestOptions:
        """Returns the options of a request that names this as its model. ModelNotFound."""
        adapter = self.adapter(name)
        return replace(options, adapter=adapter) if adapter else options

    def answered(self, options: RequestOptions | None) -> str:
        """Returns the name of what answers a request with these options: its adapter's or the model's."""
        return (options and options.adapter) or self.name

    def find_name(self, name: str) -> str:
        """Returns the served name that a request's means: in any case and with or without `:latest`; a model's also
        with or without ORG/. ModelNotFound for none."""
        asked = plain_name(name)
        for adapter in self.adapters:
            if asked == plain_name(adapter.name):
                return adapter.name
        for known in self.names:
            served = plain_name(known)
            *org, last = asked.rsplit("/", 1)
            *served_org, served_last = served.rsplit("/", 1)
            if asked == served or (last == served_last and not (org and served_org)):
                return known
        names = " and ".join(map(repr, self.all_names))
        raise ModelNotFound(f"model {name[:128]!r} is not served here, this server has {names}")

    @classmethod
    def of(
        cls,
        info: ClusterInfo,
        config: GatewayConfig,
        defaults: SamplingDefaults | None = None,
        list_adapters: Callable[[], tuple[AdapterModule, ...]] | None = None,
    ) -> ServedModel:
        """Returns the model of a ready cluster. `defaults`: read from its files if they are not known yet, which may
        raise CheckpointError or ConfigError. `list_adapters` None: the cluster's adapters stay what they are."""
        known = (__version__, info.model, info.model_path, info.max_model_len, info.vocab_size)
        name, *aliases = config.served_model_name or (info.model,)
        check_names(info.adapter_names, (name, *aliases))
        return cls(
            name=name,
            root=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            defaults=defaults or sampling_defaults(info.model_path, info.model, config.generation),
            created=int(time.time()),
            fingerprint=f"fp_{hashlib.sha256(repr(known).encode()).hexdigest()[:10]}",
            aliases=tuple(aliases),
            card=_card(info, config),
            list_adapters=list_adapters or (lambda: info.adapters),
        )


def _card(info: ClusterInfo, config: GatewayConfig) -> EmbeddingCard:
    card, file = embedding_card(info.model_path, info.model), config.chat.rerank_template
    if not file:
        return card
    if card.head is None:
        raise ConfigError(f"--rerank-template is given, {info.model} is no reranker: leave it out")
    try:
        template = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--rerank-template is {file!r}, which cannot be read: {error}") from error
    return replace(card, head=replace(card.head, template=check_template(template)))
