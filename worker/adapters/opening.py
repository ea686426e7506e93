"""The adapters that the configuration names, read into a loaded model's slots."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from allspan.kernels.packer import Packer
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.adapters import most_adapters, most_slots, parse_modules
from allspan.protos.config.settings import AdapterConfig
from allspan.worker.adapters.registry import AdapterRegistry
from allspan.worker.adapters.slots import AdapterSlots
from allspan.worker.adapters.staged import difference
from allspan.worker.models.holding import Holding
from allspan.worker.models.model import Model
from allspan.worker.parallel.agree import exchange
from allspan.worker.parallel.base import Collectives
from allspan.worker.step.backend import HOST
from allspan.worker.step.side_copies import SideCopies

logger = logging.getLogger(__name__)


def adapter_slots(holding: Holding, config: AdapterConfig, packer: Packer | None = None) -> AdapterSlots | None:
    """Returns the slots, without memory yet; None where there are to be none. Raises ConfigError where adapters cannot
    be served."""
    parse_modules(config)
    if not (num_slots := most_slots(config)):
        return None
    return AdapterSlots(holding, num_slots, config.max_lora_rank, packer)


def bytes_of_adapters(holding: Holding, config: AdapterConfig, device: str) -> int:
    """Returns what the slots of the adapters that are named will take on this rank. Raises ConfigError where adapters
    cannot be served."""
    slots = adapter_slots(holding, config)
    return 0 if slots is None else _num_bytes(slots, config, device)


def check_adapters(holding: Holding, config: AdapterConfig, device: str) -> int:
    """Returns `bytes_of_adapters`. Raises ConfigError as `open_adapters` does, but for numbers that are not finite:
    before the model's weights are read, which may take long."""
    slots = adapter_slots(holding, config)
    if slots is None:
        return 0
    for module in parse_modules(config):
        with _named(module):
            slots.check(_folder(module))
    return _num_bytes(slots, config, device)


def open_adapters(
    model: Model,
    config: AdapterConfig,
    device: str,
    collectives: Collectives,
    packer: Packer,
    copies: SideCopies,
    await_others: Callable[[], None],
) -> AdapterRegistry | None:
    """Reads adapter i of the list into slot i, or into host memory behind the last slot, and has the model's requests
    take adapters; None where it is to take none. `packer` must not be the one of the steps; adapters that are loaded
    later come by `copies`; `await_others` waits for the other ranks, however long they read. Raises ConfigError as
    `bytes_of_adapters` does, and naming it for an adapter that cannot be read, or that ranks have read differently."""
    slots = adapter_slots(model.holding, config, packer)
    if slots is None:
        return None
    begun, modules = time.monotonic(), parse_modules(config)
    slots.allocate(device)
    registry = AdapterRegistry(slots, collectives, config.lora_dir, _num_copies(config) > 0, copies)
    checksums: list[str] = []
    for number, module in enumerate(modules):
        with _named(module):
            slot, staged = number if number < slots.num_slots else -1, slots.stage(_folder(module))
        registry.take(module.loaded(), slot, staged)
        checksums.append(staged.checksum)
    await_others()
    for module, checksum in zip(modules, checksums, strict=True):
        with _named(module):
            if problem := difference(exchange(checksum, collectives)):
                raise CheckpointError(problem)
    model.add_adapters(slots)
    logger.info(
        "adapters: %s of rank up to %d, %.1f MiB, %d read in %.1f s",
        counted(slots.num_slots, "slot"),
        config.max_lora_rank,
        slots.num_bytes / 2**20,
        len(modules),
        time.monotonic() - begun,
    )
    return registry


def _num_bytes(slots: AdapterSlots, config: AdapterConfig, device: str) -> int:
    """The bytes of the slots, and of host memory beside them where that is the device's."""
    copies = _num_copies(config) if device == HOST else 0
    return slots.num_bytes + copies * slots.num_bytes // slots.num_slots


def _num_copies(config: AdapterConfig) -> int:
    """Most adapters in host memory: none, where each has a slot of its own."""
    most, num_slots = most_adapters(config), most_slots(config)
    return most if most > num_slots else 0


@contextmanager
def _named(module: AdapterModule) -> Iterator[None]:
    """Has errors of a folder name the adapter."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"lora_modules: the adapter {module.name!r} cannot be loaded: {error}") from error


def _folder(module: AdapterModule) -> Path:
    return Path(module.path).expanduser()
