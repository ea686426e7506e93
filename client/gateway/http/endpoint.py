"""The row that describes one HTTP endpoint: routing, access checks and the OpenAPI document are made from it."""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

Json = dict[str, Any]


class Access(enum.Enum):
    """The credentials that a caller must present."""

    NOTHING = "nothing"
    KEY = "a key"
    ADMIN = "the admin key"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str
    """One sentence for the OpenAPI document."""
    access: Access = Access.KEY
    body: type[BaseModel] | None = None
    """The model that its body is parsed with; None: no JSON body is described."""
    required: tuple[str, ...] = ()
    """Fields of the body that must be given, beside those that the model's types require."""
    answer: Json | None = None
    """JSON schema of its answer, where callers may rely upon one."""
    media_types: tuple[str, ...] = ()
    """The media types of answers that are not JSON, or not only."""
    is_described: bool = True
    """Whether the OpenAPI document has it."""

    @property
    def key(self) -> tuple[str, str]:
        """The path and the method as the OpenAPI document names them."""
        return re.sub(r":\w+}", "}", self.path), self.method.lower()
