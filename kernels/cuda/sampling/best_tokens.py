"""The most likely token of each row of logits: see scan.cu."""

from __future__ import annotations

from torch import Tensor

from allspan.kernels.cuda.sampling.scan import scan
from allspan.kernels.cuda.sampling.workspace import SamplingWorkspace, check_rows


def best_tokens(logits: Tensor, out: Tensor, workspace: SamplingWorkspace) -> None:
    """out[i] = the most likely token of logits[i], of equals the first; -1 where a logit is NaN or +inf; else -2 where
    all are -inf. logits: float32 [m, vocab]; out: int32 [m] or [m, columns], of which the first is written.

    Raises ValueError for what does not fit and BackendUnavailable without CuPy."""
    m = check_rows(logits, out, workspace)
    if m:
        scan(logits, None, out, workspace)
