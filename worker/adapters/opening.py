"""The adapters that the configuration names, read into a loaded model's slots."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.adapters import parse_modules
from allspan.protos.config.settings import AdapterConfig
from allspan.worker.adapters.slots import AdapterSlots
from allspan.worker.models.holding import Holding
from allspan.worker.models.model import Model
from allspan.worker.models.shard import WHOLE
from allspan.worker.step.backend import HOST

logger = logging.getLogger(__name__)


def bytes_of_adapters(holding: Holding, config: AdapterConfig, device: str) -> int:
    """Returns what the slots of the adapters that are named will take on this rank. Raises ConfigError where adapters
    cannot be served."""
    slots = _slots(holding, config, device)
    return 0 if slots is None else slots.num_bytes


def check_adapters(holding: Holding, config: AdapterConfig, device: str) -> int:
    """Returns `bytes_of_adapters`. Raises ConfigError as `open_adapters` does, but for numbers that are not finite:
    before the model's weights are read, which may take long."""
    slots = _slots(holding, config, device)
    if slots is None:
        return 0
    for module in parse_modules(config):
        with _named(module):
            slots.check(_folder(module))
    return slots.num_bytes


def open_adapters(model: Model, config: AdapterConfig, device: str) -> None:
    """Reads adapter i of the list into slot i, and has the model's requests take them. Raises ConfigError as
    `bytes_of_adapters` does, and for an adapter that cannot be read, naming it."""
    slots = _slots(model.holding, config, device)
    if slots is None:
        return
    begun, modules = time.monotonic(), parse_modules(config)
    slots.allocate(device)
    for slot, module in enumerate(modules):
        with _named(module):
            slots.load(slot, _folder(module))
    model.add_adapters(slots)
    logger.info(
        "adapters: %s of rank up to %d, %.1f MiB, read in %.1f s",
        counted(len(modules), "slot"),
        config.max_lora_rank,
        slots.num_bytes / 2**20,
        time.monotonic() - begun,
    )


def _slots(holding: Holding, config: AdapterConfig, device: str) -> AdapterSlots | None:
    """The slots, without memory yet; None where no adapter is named."""
    modules = parse_modules(config)
    if not modules:
        return None
    if device != HOST:
        raise ConfigError(f"lora_modules is given, but adapters are not supported on {device}: use --device cpu")
    if holding.shard.stage != WHOLE:
        raise ConfigError("lora_modules is given, but adapters are not supported in pipelines: use tensor parallelism")
    if holding.shard.attends_apart:
        raise ConfigError("lora_modules is given, but adapters do not go with data_parallel_attention: leave one out")
    return AdapterSlots(holding, len(modules), config.max_lora_rank)


@contextmanager
def _named(module: AdapterModule) -> Iterator[None]:
    """Has errors of a folder name the adapter."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"lora_modules: the adapter {module.name!r} cannot be loaded: {error}") from error


def _folder(module: AdapterModule) -> Path:
    return Path(module.path).expanduser()
