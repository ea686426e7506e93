"""The options of one request beside its sampling: its place in the queue, its timeout and its use of caches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from allspan.protos.api.adapters import MAX_NAME_CHARS
from allspan.protos.api.errors import InvalidRequest

MAX_TIMEOUT_S = 86_400.0
MAX_CACHE_SALT_CHARS = 256
POOLINGS = ("last", "mean", "cls", "score")
"""What a request may ask for instead of tokens: the final hidden state of its last token, the mean over all tokens,
that of its first token, or what the model's score head makes of the last one's."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Validated on construction; raises InvalidRequest naming the field."""

    priority: int = 0
    """Lower goes first, and may make a higher one wait again; -2**31 to 2**31-1."""
    timeout_s: float | None = None
    """Seconds from arrival, queueing included, after which the request fails with DeadlineExceeded; None: no limit."""
    prefix_cache: bool = True
    """False: neither uses pages that the prefix cache holds nor leaves any there."""
    cache_salt: str = ""
    """A salt of the prefix cache: only requests of the same salt share cached pages; at most 256 characters."""
    pooling: str = ""
    """One of POOLINGS: the result is a vector, and nothing is sampled; "": the result is tokens."""
    adapter: str = ""
    """The name of the LoRA adapter that computes it together with the model; "": the model alone."""

    speculation: bool = True
    """False: no tokens are drafted for it where the server does that (`--speculative-config`)."""

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest(f"priority is {self.priority!r}, must be an integer", "priority")
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(f"priority is {self.priority}, must be from {-(2**31)} to {2**31 - 1}", "priority")
        self._check_timeout()
        if self.pooling not in ("", *POOLINGS):
            raise InvalidRequest(
                f"pooling is {self.pooling!r}, must be one of {', '.join(POOLINGS)}, or empty for tokens", "pooling"
            )
        for name in ("prefix_cache", "speculation"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {value!r}, must be true or false", name)
        if not isinstance(self.cache_salt, str):
            raise InvalidRequest(f"cache_salt is {self.cache_salt!r}, must be text", "cache_salt")
        if len(self.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt has {len(self.cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS}", "cache_salt"
            )
        if not isinstance(self.adapter, str):
            raise InvalidRequest(f"adapter is {self.adapter!r}, must be an adapter's name, or empty", "adapter")
        if len(self.adapter) > MAX_NAME_CHARS:
            raise InvalidRequest(
                f"adapter has {len(self.adapter)} characters, an adapter's name at most {MAX_NAME_CHARS}", "adapter"
            )

    def _check_timeout(self) -> None:
        value = self.timeout_s
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(f"timeout_s is {value!r}, must be a number of seconds", "timeout_s")
        if not math.isfinite(value) or not 0.0 < value <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"timeout_s is {value}, must be more than 0 and at most {MAX_TIMEOUT_S:g}; leave it out for no limit",
                "timeout_s",
            )
