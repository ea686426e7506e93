"""SharedRows: what the rows of a decode step have in common, as inputs of the kernels that read it once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.cuda.attention.cascade_rule import CascadeRule, Sharing
from allspan.worker.step.inputs import SharedInputs

Ints = NDArray[np.int32]

_PREFIX = "shared "
_NAMES = tuple(field.name for field in fields(SharedInputs))


class SharedRows:
    """Decides by a cascade rule which rows are read as one. `rule` None: what decodes share is not looked at."""

    def __init__(self, rule: CascadeRule | None, buckets: Iterable[int], page_size: int) -> None:
        self._rule = rule
        self._page_size = page_size
        self.buckets = frozenset(rows for rows in buckets if rule and rule.may_pay(rows))
        """Numbers of rows for which there are inputs whose rows share tokens as well."""
        self._common: Ints | None = None
        self._sharing: Sharing | None = None
        """What is made of `_common`."""

    def choose(self, common: Ints | None, bucket: int) -> Sharing | None:
        """What a step of `bucket` rows reads once; None where plain decode takes no longer."""
        if self._rule is None or common is None or bucket not in self.buckets:
            return None
        if common is not self._common:
            self._common, self._sharing = common, self._rule.choose(common, bucket)
        return self._sharing

    def padding(self, bucket: int) -> Sharing | None:
        """The sharing of `bucket` rows that are all padding."""
        return None if self._rule is None else self._rule.cut([(bucket, 0)], bucket)

    def lengths(self, bucket: int) -> dict[str, int]:
        """How many numbers `values` has, by name, in a step of `bucket` rows."""
        if self._rule is None:
            return {}
        groups, tiles = self._rule.sizes(bucket)
        lengths = (2 * tiles, groups + 1, groups + 1, groups, bucket + 1, bucket)
        return {_PREFIX + name: length for name, length in zip(_NAMES, lengths, strict=True)}

    def values(self, sharing: Sharing, indptr: Ints, kv_lens: Ints) -> dict[str, Ints]:
        """What is copied to the device, by name; `indptr` and `kv_lens` are those of the whole page table."""
        level, own = sharing.tables(indptr, kv_lens, self._page_size)
        values = (sharing.tiles.reshape(-1), sharing.qo_indptr, *level, *own)
        return {_PREFIX + name: value for name, value in zip(_NAMES, values, strict=True)}

    @staticmethod
    def take(views: dict[str, Any]) -> SharedInputs:
        """The tensors of `values`, taken out of the step's by their names."""
        shared = {name: views.pop(_PREFIX + name) for name in _NAMES}
        shared["tiles"] = shared["tiles"].view(-1, 2)
        return SharedInputs(**shared)
