"""The score head of a reranker: the difference of two rows of its head, read once and on its own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.hf_overrides import parse_overrides
from allspan.protos.config.settings import ModelConfig
from allspan.protos.embeddings.card import EmbeddingCard, embedding_card
from allspan.worker.load.loader import open_checkpoint
from allspan.worker.load.registry import find_model
from allspan.worker.models.layout import embedding_of, head_of
from allspan.worker.models.shard import make_shard
from allspan.worker.models.source import PieceSource


class ScoreHead:
    """What makes a score of a hidden state. `weight` [labels, hidden] is there on the rank that `load`s it."""

    def __init__(self, config: ModelConfig) -> None:
        """Reads what the model's files say; CheckpointError."""
        self._config = config
        is_real = config.load_format != "dummy"
        self.card = embedding_card(config.path, config.name) if is_real else EmbeddingCard()
        self.weight: NDArray[np.float64] | None = None

    @property
    def generates(self) -> bool:
        """Whether requests may ask for tokens, too."""
        return self.card.generates

    @property
    def num_labels(self) -> int:
        """Scores of a request; 0: there is no head."""
        return int(self.card.head is not None)

    def load(self) -> None:
        """Reads the two rows from the checkpoint. CheckpointError, ConfigError."""
        if self.card.head is None:
            return
        from allspan.protos.text.tokenizers.loading import load_tokenizer  # no other model's ranks need it

        source = find_model(self._config.path, parse_overrides(self._config.hf_overrides))
        if source.converted is not None:
            raise ConfigError(f"{self._config.path} is converted: scores need the model that it was made from")
        spec = source.spec
        piece = embedding_of(spec) if spec.tie_word_embeddings else head_of(spec)
        checkpoint = open_checkpoint(source, self._config.load_format)
        weights = PieceSource(make_shard(0, 1), source.family.weights, checkpoint, piece)
        rows = []
        for token in self.card.head.token_ids(load_tokenizer(self._config.path)):
            row = torch.empty((1, spec.hidden_size))
            weights.floats(0, range(token, token + 1), range(spec.hidden_size), row)
            rows.append(row[0].double().numpy())
        checkpoint.release()
        self.weight = (rows[1] - rows[0])[None]
