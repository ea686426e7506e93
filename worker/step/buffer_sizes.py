"""The sizes that the buffers of a model and of a step are made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """For what the buffers are made: tokens and rows of logits of a step, and tokens of a request."""

    max_tokens: int
    max_requests: int
    max_model_len: int
    uses_cascades: bool = True
    """On a GPU: attention has room for states of tokens that several requests share."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The most that one step and one row may hold."""

    max_rows: int
    max_tokens: int
    """Of a step."""
    max_model_len: int
    page_size: int
    max_logits_rows: int
    """Of a step."""
