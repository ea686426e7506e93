"""What attention takes of a step beside queries and pages."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionMeta(Protocol):
    """Which tokens and pages belong to which request: `meta` of `attention` on the CPU. Tensors are
    int32 where nothing else is said."""

    qo_indptr: Tensor
    """[R + 1]: tokens of request r are qo_indptr[r] .. qo_indptr[r + 1]."""
    page_indptr: Tensor
    """[R + 1]: into page_indices."""
    page_indices: Tensor
    """Pages of each request, in order."""
    kv_lens: Tensor
    """[R]: tokens in the cache, the new ones included."""
    kv_head_of: Tensor
    """[Hq]: which of this rank's KV heads each query head reads (uneven splits share no fixed ratio)."""
    scale: float
    """The factor of the attention logits, usually 1/sqrt(d)."""
    window: int
    """Tokens that a query sees, its own included; those before them are not read. 0: all tokens."""
    soft_cap: float
    """The logits' limit, which tanh approaches; 0: none."""
    slopes: Tensor | None
    """float32 [Hq]: what is added to each query head's logits for each token that a key is ahead of the query, as in
    ALiBi (O. Press et al., arXiv:2108.12409); None: nothing."""
