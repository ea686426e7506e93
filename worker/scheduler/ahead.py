"""Which rows go on before it is known here what they sample, so that a GPU need not wait for the next plan."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.worker.scheduler.draft import Draft
from allspan.worker.scheduler.memory import Memory
from allspan.worker.scheduler.plan import Grant
from allspan.worker.scheduler.request import Request


def rows_ahead(running: Sequence[Request], memory: Memory, draft: Draft) -> tuple[int, ...]:
    """All that run, in a step of decodes alone, but those of which this is the last token. None when there are not
    pages enough for two tokens each: running ahead puts nobody out. Pages that they need are granted in the draft."""
    if len(draft.runs) != len(running) or any(request.num_pending != 1 for request in running):
        return ()
    rows = []
    for request in running:
        if len(request.output_token_ids) + 1 >= request.max_tokens:
            continue
        if not memory.has_room(request, 2):
            pages = memory.extend(request)
            if pages is None:
                return ()
            draft.grants.append(Grant(request.row, pages))
        rows.append(request.row)
    return tuple(rows)
