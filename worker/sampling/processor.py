"""What a logits processor is: one feature of one row's sampling, with a half for the host and a half for a device.

A processor reads the row's tokens up to the position that is sampled, so it does not matter which steps it has seen: a
rank sees its share of them only, and a preempted request begins anew.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams

if TYPE_CHECKING:
    from allspan.worker.sampling.kernel import SamplingKernel

Logits = NDArray[np.float32]
TokenIds = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A request as its logits processors see it."""

    params: SamplingParams
    prompt_len: int
    tokens: NDArray[np.int32]
    """Prompt and output; what lies before the position to be sampled is valid."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kernel: SamplingKernel
    grammar: LogitsProcessor | None = None
    """The processor of `params.grammar`."""


@dataclass(slots=True)
class DeviceChange:
    """What a row's processors ask of a device, which changes its logits in one pass and in this order."""

    prompt_len: int
    tokens: NDArray[np.int32]
    """See `SamplingRow.tokens`."""
    repetition: float = 1.0
    """The repetition penalty; of the output's tokens alone where `output_only`."""
    output_only: bool = False
    presence: float = 0.0
    frequency: float = 0.0
    biases: Sequence[tuple[int, float]] = ()
    """Token ids and what is added to their logits."""
    allowed: Sequence[int] = ()
    """The only token ids that may be sampled; empty: all."""
    mask: Callable[[int], NDArray[np.int32]] | None = None
    """Gives the mask of allowed tokens for a position: token i is bit i % 32 of word i // 32."""
    bans: list[Callable[[int], TokenIds]] = field(default_factory=list)
    """Each gives token ids that may not be sampled at a position; some more than once."""
    verdict: Callable[[], int] | None = None
    """Says why no token was left, see `failure`; None: because all were masked."""

    @property
    def counts_tokens(self) -> bool:
        """Whether it must be known how often each token has come."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the logits stay as they are."""
        return not (self.counts_tokens or self.biases or self.allowed or self.mask or self.bans)


class LogitsProcessor(Protocol):
    """Changes one row's logits before a token is drawn from them."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the tokens before a position must be known on the host to change its logits on a device."""

    def apply(self, position: int, logits: Logits) -> None:
        """The host's half: changes `logits` [vocabulary] of the token at `position`, in place."""

    def on_device(self, change: DeviceChange) -> None:
        """The device's half: writes down there what the device has to do."""


class TokenMask(ABC):
    """A logits processor that forbids tokens: their logits become -inf."""

    @property
    @abstractmethod
    def needs_tokens(self) -> bool:
        """Whether which tokens are forbidden depends on those before the position."""

    @abstractmethod
    def ids(self, position: int) -> TokenIds:
        """The token ids that are forbidden there; some more than once."""

    def apply(self, position: int, logits: Logits) -> None:
        logits[self.ids(position)] = -math.inf

    def on_device(self, change: DeviceChange) -> None:
        change.bans.append(self.ids)
