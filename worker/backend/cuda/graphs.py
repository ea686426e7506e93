"""A forward pass that a GPU has recorded: one launch runs it again, on whatever its inputs hold then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Graph:
    """Calls `forward` twice: once for what must not be recorded (kernels are compiled, libraries take their memory),
    once to record it. It must look at nothing on the host and always use the same memory."""

    def __init__(self, forward: Callable[[], Tensor], others: Iterable[Graph] = ()) -> None:
        """`others` never run at the same time: they share their memory."""
        warmup: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            forward()
        torch.cuda.current_stream().wait_stream(warmup)
        self._graph = torch.cuda.CUDAGraph()
        pool: Any = next((other.pool for other in others), None)
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = forward()

    @property
    def pool(self) -> Any:
        """Where what `forward` allocated lies."""
        return self._graph.pool()

    def replay(self) -> Tensor:
        """What `forward` returned: the same tensor each time."""
        self._graph.replay()
        return self._output
