"""Weights: one rank's weights and KV pages as memory that can be given back and filled again, while the rank lives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from allspan.protos.api.errors import AllspanError, CheckpointError, Unavailable
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.backend.table import open_backend
from allspan.worker.load import loader
from allspan.worker.models.model import Model
from allspan.worker.models.spec_json import difference as spec_difference
from allspan.worker.parallel.agree import exchange
from allspan.worker.parallel.base import Collectives
from allspan.worker.process.release_memory import give_back, take_again
from allspan.worker.step.backend import DeviceSteps

logger = logging.getLogger(__name__)


class Weights:
    """`unload` and `reload` are called by every rank's step loop at the same step, between two of them.

    The CPU's tensors stay where they are: what the forward pass has recorded of them stays true. A GPU's get other
    memory, for which its steps are captured again; it also gives back what its ops write to.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        cache: CacheConfig,
        collectives: Collectives,
        pages: Sequence[Tensor],
        await_others: Callable[[], None] = lambda: None,
        steps: DeviceSteps | None = None,
    ) -> None:
        """`pages` are the tensors of the KV cache; `await_others` waits for every rank, however long it takes; `steps`
        are there on a GPU."""
        self.is_loaded = True
        self._capabilities = open_backend(config.device).capabilities
        self._model = model
        self._config = replace(config, expert_load="")  # the model knows where its experts are: the file may be gone
        self._cache = cache
        self._collectives = collectives
        self._pages = tuple(pages)
        self._await_others = await_others
        self._steps = steps

    def unload(self) -> None:
        """Gives the memory back. Raises, on every rank, Unavailable where that cannot be, and CheckpointError when a
        system does not take it."""
        if not self._capabilities.gives_memory_back:
            raise Unavailable(
                "weights can be unloaded from a GPU's memory, and on Linux from the CPU's; restart to free the memory"
            )
        self.is_loaded = False
        failure = ""
        try:
            self._give_back()
        except AllspanError as error:
            failure = error.message
        self._agree(failure)

    def discard(self) -> None:
        """After the last step: the memory goes back now, not once the last reference to a tensor is collected."""
        if not self._capabilities.gives_memory_back:
            return
        self.is_loaded = False
        try:
            self._give_back()
        except (AllspanError, RuntimeError) as error:  # a GPU that has failed, or hangs
            logger.warning("memory is given back when this process ends, not now: %s", error)

    def reload(self, on_progress: Callable[[], None]) -> None:
        """Reads the weights from the model's path again. `on_progress` is called after each weight.

        Raises CheckpointError, the same on every rank and naming the first that failed. When a rank cannot open the
        files, or finds another model there, nothing has been read: weights that were loaded still are. When reading
        breaks off, they are not.
        """
        self.read(self.opened(), on_progress)

    def opened(self) -> loader.Weights:
        """Opens what lies at the model's path now; `read` comes next. Raises as `reload`, with nothing read."""
        failure, weights = "", None
        try:
            weights = self._open()
        except (AllspanError, OSError) as error:
            failure = str(error)
        self._agree(failure)
        assert weights is not None  # else this rank's failure has been raised
        return weights

    def read(self, weights: loader.Weights, on_progress: Callable[[], None]) -> None:
        """Reads what was opened just now. Raises as `reload`."""
        failure = ""
        self.is_loaded = False
        try:
            model = self._model
            if self._steps is not None:
                self._steps.drain()
                model.forget_graphs()
            take_again(self._tensors())
            weights.read(self._capabilities.tensors, lambda done, total: on_progress(), model.weights)
            model.weights_changed()
        except (AllspanError, OSError, RuntimeError, ValueError) as error:
            failure = str(error)
        self._await_others()
        self._agree(failure)
        if self._steps is not None:
            self._steps.capture()
        self.is_loaded = True

    def checkpoint(self) -> loader.CheckpointWeights:
        """Opens what the weights were read from, and says how it spells them. Raises CheckpointError."""
        weights = self._open()
        if not isinstance(weights, loader.CheckpointWeights):
            raise CheckpointError(f"{self._config.path}: is converted, and has slices of experts alone")
        return weights

    def _give_back(self) -> None:
        if self._steps is not None:
            self._steps.drain()
            self._model.forget_graphs()
        give_back(self._tensors())
        if self._steps is not None:
            self._steps.trim()

    def _tensors(self) -> list[Tensor]:
        """Whose memory is given back."""
        return [*self._model.weights.values(), *self._pages, *(self._model.buffers if self._steps else ())]

    def _open(self) -> loader.Weights:
        """What lies at the path now. Raises CheckpointError unless it is a model like the one that was loaded."""
        config = self._config
        ranks = self._collectives
        prepared = loader.prepare(config, self._cache, ranks.rank, ranks.size, loader.stage_of(ranks))
        difference = spec_difference(self._model.spec, prepared.source.spec)
        if not difference and prepared.holding.stored != self._model.holding.stored:
            difference = "its tensors are of other types"
        if difference:
            raise CheckpointError(
                f"{config.path}: another model lies here now ({difference}); restart to serve it, or put weights of "
                "the same shapes back"
            )
        spelled = replace(self._model.holding, weights=prepared.holding.weights)  # which names the tensors may change
        return loader.open_weights(prepared.source, spelled, config)

    def _agree(self, failure: str) -> None:
        """Exchanges how it went on every rank; raises the first failure on all of them."""
        told = exchange(failure, self._collectives)
        for rank, message in enumerate(told):
            if message:
                raise CheckpointError(message if len(told) == 1 else f"rank {rank}: {message}")


class AllWeights:
    """The weights of the models that a rank has loaded, the first one's with the KV pages of all: see `Weights`."""

    def __init__(self, *each: Weights) -> None:
        self._each = each

    @property
    def is_loaded(self) -> bool:
        return all(each.is_loaded for each in self._each)

    def unload(self) -> None:
        """See `Weights.unload`."""
        for each in self._each:
            each.unload()

    def discard(self) -> None:
        """See `Weights.discard`."""
        for each in self._each:
            each.discard()

    def reload(self, on_progress: Callable[[], None]) -> None:
        """See `Weights.reload`. Nothing is read before the files of all models are open."""
        opened = [each.opened() for each in self._each]
        for each, weights in zip(self._each, opened, strict=True):
            each.read(weights, on_progress)

    def checkpoint(self) -> loader.CheckpointWeights:
        """What the first model's were read from. Raises CheckpointError."""
        return self._each[0].checkpoint()
