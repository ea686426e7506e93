"""Metadata of attention: what its op wants to know of a step beside queries and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from allspan.kernels.cuda.attention.cascade_rule import CascadeRule
from allspan.kernels.ops import OpSet
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.step.buffer_sizes import ModelLimits
from allspan.worker.step.inputs import PlanTiles, StepInputs


@dataclass(frozen=True, slots=True)
class MetaContext:
    """What metadata is made for: the pages of its cache group, and where it is used."""

    cache: CacheSpec
    limits: ModelLimits
    ops: OpSet
    device: str


class StepMeta(Protocol):
    """Makes the metadata of each step."""

    @property
    def plan_tiles(self) -> PlanTiles | None:
        """How attention wants the tokens of a step cut on the host; None: it does not."""

    @property
    def cascade_rule(self) -> CascadeRule | None:
        """When attention reads what the rows of a decode step share once for all of them; None: never."""

    def of(self, inputs: StepInputs) -> Any: ...


MakeMeta = Callable[[MetaContext], StepMeta]
