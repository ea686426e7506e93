"""Errors of a conversation, told in the words of another protocol that was turned into one."""

from __future__ import annotations

from collections.abc import Mapping

from allspan.protos.api.errors import InvalidRequest


def renamed(error: InvalidRequest, names: Mapping[str, str], parts: Mapping[str, str] | None = None) -> InvalidRequest:
    """Returns the error with the protocol's names.

    `names`: a conversation's field → the protocol's. `parts`: what else stands in messages → what it is called there.
    """
    field = error.field or ""
    name = names.get(field, field)
    message = error.message.replace(field, name) if field in names else error.message
    for ours, theirs in (parts or {}).items():
        message = message.replace(ours, theirs)
    return InvalidRequest(message, name)
