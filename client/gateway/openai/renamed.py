"""Errors of a conversation, told in the words of another protocol that was turned into one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from allspan.protos.api.errors import InvalidRequest

_QUOTED = re.compile(r"""([^'"]*)(.*)""", re.DOTALL)


def renamed(error: InvalidRequest, names: Mapping[str, str], parts: Mapping[str, str] | None = None) -> InvalidRequest:
    """Returns the error with the protocol's names.

    `names`: a conversation's field → the protocol's. `parts`: what else stands in messages → what it is called there.
    Each is replaced once, and only before the first quotation mark: behind it stand the caller's own words.
    """
    field = error.field or ""
    name = names.get(field, field)
    place, rest = _QUOTED.fullmatch(error.message).groups()  # type: ignore[union-attr]  # it matches every text
    if field in names:
        place = place.replace(field, name, 1)
    for ours, theirs in (parts or {}).items():
        place = place.replace(ours, theirs, 1)
    return InvalidRequest(place + rest, name)
