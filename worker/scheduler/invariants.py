"""Whether a scheduler's queue, rows and states agree: for tests and idle moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from allspan.protos.api.errors import InternalError
from allspan.worker.scheduler.request import Request, RequestStatus

_ENDED = (RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where requests stand."""

    running: Sequence[Request]
    waiting: Sequence[Request]
    rows: Sequence[Request | None]
    free_rows: Collection[int]


def check_standing(
    standing: Standing, requests: Mapping[bytes, Request], place: Callable[[Request], tuple[int, int]]
) -> None:
    """Raises InternalError for the rules that are broken. `place` orders requests."""
    running, waiting = standing.running, standing.waiting
    in_rows = [request for request in standing.rows if request is not None]
    rules = {
        "running requests have the rows": {id(r) for r in in_rows} == {id(r) for r in running},
        "rows are free or taken": sorted(standing.free_rows) == [i for i, r in enumerate(standing.rows) if r is None],
        "all stand in their places": list(running) == sorted(running, key=place)
        and list(waiting) == sorted(waiting, key=place),
        "no request is lost": len(waiting) + len(running) == len(requests),
        "no ended request is kept": all(r.status not in _ENDED for r in requests.values()),
        "not all is computed": all(r.num_computed < r.num_tokens for r in running),
        "waiting requests hold nothing": not any(r.held or r.row >= 0 or r.num_computed for r in waiting),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise InternalError(f"the scheduler is inconsistent: {'; '.join(broken)}")
