"""How much a model's buffers must hold."""

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
