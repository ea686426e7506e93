"""What a sampler has: a kernel of the host, and on some devices one that works where the logits are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.worker.sampling.kernel import SamplingKernel, Settings, sampling_kernel
from allspan.worker.sampling.processor import DeviceChange

Rows = NDArray[np.int64]


class DeviceTokens(Protocol):
    """The tokens of a step, on their way on a device."""

    @property
    def tokens(self) -> Tensor:
        """int32 [m] on the device, valid until the next launch; negative where there is none."""

    def result(self) -> NDArray[np.int32]:
        """Waits. int32 [m, 1], or with what `log_softmax_rows` of `reference` adds. Raises DeadlineExceeded."""


class DeviceSampler(Protocol):
    """Samples rows of logits on the device that holds them, without waiting for it."""

    def add(self, row: int, asked: DeviceChange) -> None:
        """A row begins, which asks for this."""

    def remove(self, row: int) -> None: ...

    def launch_best(self, logits: Tensor) -> DeviceTokens:
        """The most likely token of each row of `logits` float32 [m, vocabulary]."""

    def best_pairs(self, logits: Tensor) -> NDArray[np.int32]:
        """int32 [m, 2] on the host: the most likely token of each row, or a failure, and its logit's bits."""

    def launch(
        self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows, settings: Settings, counts: Rows
    ) -> DeviceTokens:
        """A token for each row of `logits` float32 [m, vocabulary], which are changed; where `counts` [m] are not
        negative its log-probability, too, and those of that many of the most likely ones. `settings`: of all rows."""


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()


@dataclass(frozen=True, slots=True)
class Sampling:
    """The kernels that a `Sampler` works with; by default those of the host alone, on one thread."""

    kernel: SamplingKernel = field(default_factory=sampling_kernel)
    device: DeviceSampler | None = None
    """For logits of as many columns as this rank has; None: logits are copied to the host."""
    to_host: Callable[[Tensor], Tensor] = _to_host
    """Gives a copy on the host, or the tensor itself where it is there. Raises DeadlineExceeded."""
