"""What one forward pass reads: the step's tokens and where their KV lies. Filled by the runner, read by every op."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """Views into buffers of fixed capacity, cut to this step's sizes. All int32, on the model's device.

    n new tokens, R requests with new tokens, m rows whose logits are wanted. Given to a model again, it has the same
    tensors as before, though there may be other numbers in them.
    """

    ids: Tensor
    """[n] token ids."""
    positions: Tensor
    """[n]."""
    slots: Tensor
    """[n]: page · page_size + offset."""
    qo_indptr: Tensor
    """[R + 1]."""
    page_indptr: Tensor
    """[R + 1]."""
    page_indices: Tensor
    """[page_indptr[R]]."""
    kv_lens: Tensor
    """[R], the new tokens included."""
    logits_rows: Tensor
    """[m]: which of the n tokens."""
