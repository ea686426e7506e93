"""Page events as vLLM's KV events: arrays that begin with a name, or maps with a `type`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from allspan.protos import worker_pb2 as pb

Format = Literal["arrays", "maps"]

_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class KvEvents:
    """The events of one replica, in order. It knows in which tier a page is, so that one that moves is removed from the
    tier where it was."""

    def __init__(self, written: Format = "arrays") -> None:
        self._written = written
        self._media: dict[int, str] = {}

    def of(self, told: pb.PageEvents) -> list[Any]:
        """Returns the events: all gone, then those removed, then those stored; pages in a row are one event."""
        events: list[Any] = []
        if told.cleared:
            self._media.clear()
            events.append(self._event("AllBlocksCleared"))
        gone: dict[str, list[int]] = {}
        for key in told.removed:
            if (medium := self._media.pop(key, None)) is not None:
                gone.setdefault(medium, []).append(key)
        for page in told.stored:
            before = self._media.get(page.key)
            if before is not None and before != page.medium:
                gone.setdefault(before, []).append(page.key)
            self._media[page.key] = page.medium
        events += [self._event("BlockRemoved", keys, medium) for medium, keys in gone.items()]
        events += [self._stored(pages, told.page_tokens) for pages in rows(told.stored)]
        return events

    def _stored(self, pages: Sequence[pb.PageStored], page_tokens: int) -> Any:
        tokens = [token for page in pages for token in page.token_ids]
        keys = [page.key for page in pages]
        parent, lora_id = pages[0].parent or None, pages[0].lora_id or None
        return self._event("BlockStored", keys, parent, tokens, page_tokens, lora_id, pages[0].medium)

    def _event(self, name: str, *values: Any) -> Any:
        if self._written == "arrays":
            return [name, *values]
        return {"type": name, **dict(zip(_FIELDS[name], values, strict=True))}

    def batch(self, at: float, events: list[Any], replica: int) -> Any:
        """`at`: seconds since 1970."""
        if self._written == "arrays":
            return [at, events, replica]
        return {"ts": at, "events": events, "data_parallel_rank": replica}


def rows(pages: Sequence[pb.PageStored]) -> list[list[pb.PageStored]]:
    """Returns the pages in rows, each page the child of the one before it and in the same tier."""
    found: list[list[pb.PageStored]] = []
    for page in pages:
        if found and page.parent == found[-1][-1].key and page.medium == found[-1][-1].medium:
            found[-1].append(page)
        else:
            found.append([page])
    return found
