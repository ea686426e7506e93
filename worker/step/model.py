"""What the engine asks of a model and its caches; `allspan.worker` has the real ones, tests bring small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from allspan.protos.api.adapters import AdapterModule
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.spec import CacheGroup
from allspan.worker.step.inputs import StepInputs, StepMetadata
from allspan.worker.step.row_inputs import RowInputs


class StepModel(Protocol):
    """A loaded model whose cache is bound."""

    @property
    def vocab_widths(self) -> tuple[int, ...]:
        """Columns of each rank's logits; together the vocabulary."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def row_inputs(self) -> RowInputs: ...

    def forward(self, inputs: StepInputs) -> Tensor:
        """This rank's slice of the logits, float32 [m, vocab_widths[rank]]; may be overwritten until the next call."""

    def hidden_states(self, rows: Sequence[int]) -> Tensor:
        """A copy of what the head read for these rows of the last step's logits, float32 [k, hidden_size]; only asked
        for where `row_inputs` has a `hidden_size`. No index is copied to the device for a range."""

    def stream(self, inputs: StepInputs) -> Tensor:
        """The residual stream of a step's tokens, float32 [n, hidden_size], in place: what a stage of a pipeline that
        is not the first begins that step with, and what one that is not the last has made. Only asked for there."""


class Recording(Protocol):
    """A forward pass that a device has recorded."""

    def replay(self) -> Tensor:
        """Runs it again on what its inputs hold now; returns the same tensor each time."""


Record = Callable[[Callable[[], Tensor], Iterable[Recording]], Recording]
"""Records a forward pass; the recordings of the second argument never run at the same time and share its memory."""


class DeviceModel(StepModel, Protocol):
    """A model to its device's backend."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]: ...

    @property
    def step_metadata(self) -> tuple[StepMetadata, ...]:
        """What the backend made for the model's attention blocks, those of the first cache group first."""

    def bind_cache(self, *caches: KVCache) -> None:
        """Uses these pages from now on, one cache for each of `cache_groups`."""

    def capture(self, inputs: StepInputs, record: Record) -> None:
        """Records the forward pass of a step that is all padding; later steps in its place are replayed."""


class RankAdapters(Protocol):
    """The adapters that a rank has loaded; `allspan.worker.adapters.registry` has the real ones. Between two steps all
    ranks do the same."""

    @property
    def modules(self) -> Mapping[int, AdapterModule]:
        """They by their digests, in the order in which they were loaded."""

    def read(self, argument: bytes) -> None:
        """Begins to read one, as the argument of READ_ADAPTER says."""

    def wait(self, timeout: float) -> None:
        """Waits until this rank has read it, from any thread."""

    def add(self) -> bool:
        """Takes in what was read, if all ranks have read it; whether they have. Raises, alike on every rank, what the
        first that could not read it says."""

    def drop(self, adapter: int) -> None:
        """Forgets the one of this digest, or gives up reading it; an unknown one is passed over."""

    def place(self, slot: int, adapter: int) -> None:
        """Writes the one of this digest into a slot, behind the steps in flight."""


class PageTiers(Protocol):
    """The device's pages and those of host memory; `allspan.worker.cache.tiers` has the real ones."""

    num_host_pages: int
    """The same on every rank."""

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Device → host, then host → device, each in its order."""
