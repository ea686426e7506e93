"""Where the metadata of attention is made: once a loaded model, by the device's backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from allspan.kernels.ops import OpSet
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.step.backend import AttentionHeads, Backend
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import StepMetadata


@dataclass(frozen=True, slots=True)
class MetaContext:
    """What metadata is made for: the pages of its cache group, and where it is used."""

    backend: Backend
    cache: CacheSpec
    limits: ModelLimits
    ops: OpSet

    def attention(self, heads: AttentionHeads) -> StepMetadata:
        """The metadata of attention blocks with these heads. No request outgrows a window of the whole context."""
        if heads.window >= self.limits.max_model_len:
            heads = replace(heads, window=0)
        return self.backend.step_metadata(heads, self.cache, self.limits, self.ops)


MakeMeta = Callable[[MetaContext], StepMetadata]
