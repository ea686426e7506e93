"""The table of devices: a row says where a device's `Backend` is; it is imported when the device is asked for."""

from __future__ import annotations

import importlib

from allspan.protos.api.errors import ConfigError
from allspan.worker.step.backend import Backend

DEVICES = {
    "cpu": "allspan.worker.backend.cpu.backend:CpuBackend",
    "cuda": "allspan.worker.backend.cuda.backend:CudaBackend",
}
"""Device → "module:class" of its `Backend`, made of the seconds after which a device that hangs is given up."""


def open_backend(device: str, timeout_s: float = 30.0) -> Backend:
    """The backend of `device` (`ModelConfig.device`), also where no such device is there: see `Backend.check`. A wait
    for it ends after `timeout_s` seconds. Raises ConfigError for an unknown device."""
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is not known ({', '.join(DEVICES)})")
    module, _, name = DEVICES[device].partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)(timeout_s)
    return backend
