"""What is made of a weight or a bias once: see `derived`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_Held = dict[Hashable, tuple[tuple[int, int], Tensor]]


def derived(source: Tensor, kind: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Returns what `make` makes of `source`, one of each kind.

    It is made once for each content of `source`, in one place as long as that lives, so that a captured graph sees what
    a later call outside made of a tensor that was written to. While a graph is captured that has none yet, it is made
    within the graph.
    """
    if source.is_inference():  # nothing counts what is written to it
        return make()
    held = _HELD.setdefault(source, {})
    state = source.data_ptr(), source._version
    made, found = held.get(kind, (None, None))
    if found is not None and made == state:
        return found
    if source.is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    anew = make()
    if found is None or found.shape != anew.shape or found.device != anew.device:
        found = anew
    else:
        found.copy_(anew)
    held[kind] = state, found
    return found


_HELD: MutableMapping[Tensor, _Held] = WeakTensorKeyDictionary()
