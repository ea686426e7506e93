"""The sampling kernel: compiled code where there is any, numpy otherwise; both give the same bits."""

from __future__ import annotations

import importlib
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.reference import sampling as reference
from allspan.kernels.reference.sampling import Ints, Logits
from allspan.protos.api.sampling import SamplingParams

Settings = NDArray[np.void]
"""What a kernel draws by: a row of `allspan.kernels.abi.sampling.SETTINGS` for each row of the batch."""


class SamplingKernel(Protocol):
    """See `allspan.kernels.reference.sampling` for what each does. All arrays are contiguous."""

    def sample_rows(
        self, logits: Logits, rows: Ints, positions: Ints, targets: Ints, settings: Settings, out: NDArray[np.int32]
    ) -> None: ...

    def best_tokens(self, logits: Logits, out: NDArray[np.int32]) -> None: ...

    def log_softmax_rows(self, logits: Logits, counts: Ints, out: NDArray[np.int32]) -> None: ...

    def penalise_repeated(self, logits: Logits, ids: Ints, penalty: float) -> None: ...

    def penalise_counted(
        self, logits: Logits, ids: Ints, counts: NDArray[np.int32], presence: float, frequency: float
    ) -> None: ...


class NativeKernel:
    """kernels/cpu/sampling. `runtime`: an op set's threads, for the rows to be shared among; None: the caller's."""

    def __init__(self, native: Any, runtime: Any = None) -> None:
        self._native = native
        self._runtime = runtime
        self._settings: Settings | None = None
        self._table: NDArray[np.uint8] | None = None
        """The bytes of `_settings`, which is the same array at every step."""
        self.penalise_repeated = native.penalise_repeated
        self.penalise_counted = native.penalise_counted

    def sample_rows(
        self, logits: Logits, rows: Ints, positions: Ints, targets: Ints, settings: Settings, out: NDArray[np.int32]
    ) -> None:
        if settings is not self._settings:
            self._settings, self._table = settings, settings.view(np.uint8).reshape(len(settings), -1)
        self._native.sample_rows(self._runtime, logits, rows, positions, targets, self._table, out)

    def best_tokens(self, logits: Logits, out: NDArray[np.int32]) -> None:
        self._native.best_tokens(self._runtime, logits, out)

    def log_softmax_rows(self, logits: Logits, counts: Ints, out: NDArray[np.int32]) -> None:
        self._native.log_softmax_rows(self._runtime, logits, counts, out)


class ReferenceKernel:
    """Numpy."""

    sample_rows = staticmethod(reference.sample_rows)
    best_tokens = staticmethod(reference.best_tokens)
    log_softmax_rows = staticmethod(reference.log_softmax_rows)
    penalise_repeated = staticmethod(reference.penalise_repeated)
    penalise_counted = staticmethod(reference.penalise_counted)


def sampling_kernel(runtime: Any = None) -> SamplingKernel:
    """The compiled one if it is there."""
    try:
        native = importlib.import_module("allspan.kernels.cpu._native")
    except ImportError:
        return ReferenceKernel()
    return NativeKernel(native, runtime) if hasattr(native, "best_tokens") else ReferenceKernel()


def settings_of(params: SamplingParams) -> tuple[int, float, float, float, float, int, bool]:
    """Returns a request's row of the settings. A seed that was not drawn counts as 0."""
    min_z = math.log(params.min_p) if params.min_p > 0 else -math.inf
    random = not params.is_greedy
    return params.seed or 0, params.top_p, params.typical_p, params.temperature, min_z, params.top_k, random
