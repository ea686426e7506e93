"""Which ranks attend for requests of their own (data-parallel attention), as the configuration says."""

from __future__ import annotations

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.settings import ModelConfig
from allspan.worker.backend.table import open_backend
from allspan.worker.models.shard import Place
from allspan.worker.parallel.base import Collectives


def attends_apart(config: ModelConfig, size: int) -> bool:
    """Whether each of `size` ranks has whole attention for its own requests; one rank has that anyway."""
    return config.data_parallel_attention and size > 1


def attention_place(config: ModelConfig, ranks: Collectives) -> tuple[int, int]:
    """This rank's number among those that attend for requests of their own, and how many they are; 0 and 1 where every
    rank attends for all."""
    return (ranks.rank, ranks.size) if attends_apart(config, ranks.size) else (0, 1)


def check_attention(config: ModelConfig, size: int, stage: Place, is_converted: bool) -> None:
    """Raises ConfigError for what data-parallel attention does not go with."""
    if not attends_apart(config, size):
        return
    if not open_backend(config.device).capabilities.has_own_rows:
        raise ConfigError(
            f"data_parallel_attention: device {config.device!r} has no steps in which ranks attend for rows of their "
            "own: leave --data-parallel-attention out, or use --device cpu"
        )
    if stage.size > 1:
        raise ConfigError(
            f"data_parallel_attention is for one stage, pipeline_parallel_size is {stage.size}: leave "
            "--data-parallel-attention or --pipeline-parallel-size out"
        )
    if is_converted:
        raise ConfigError(
            f"data_parallel_attention needs whole attention weights, but {config.path} is converted, with slices for "
            f"{counted(size, 'rank')}: load the model that it was made from"
        )
