"""An operation on its way into a plan."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.protos.api.errors import AllspanError
from allspan.worker.scheduler.plan import Operation


@dataclass(slots=True)
class Pending:
    """Belongs to the core that was asked for it; `error` once it is done and has failed."""

    operation: Operation
    is_planned: bool = False
    is_done: bool = False
    error: AllspanError | None = None
