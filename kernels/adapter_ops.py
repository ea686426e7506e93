"""Ops of low-rank adapters (LoRA, E. Hu et al., arXiv:2106.09685): a token's adapter adds b(a(x)) to the product of a
linear layer.

Products with `a` are those of `OpSet.expert_linear`: the adapters of a model are like experts of which each token has
one or none, in places that the request chooses instead of a router. Which adapters there are changes no shape, so that
a program or a CUDA graph holds for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol

from torch import Tensor

from allspan.kernels.fused_ops import T

if TYPE_CHECKING:
    from allspan.kernels.ops import Routing


class AdapterWeights(NamedTuple, Generic[T]):
    """The second matrices of all adapters of one layer."""

    panels: T
    """[places, panels, R, 64], float32 or of 16 bits: see `allspan.kernels.adapter_layout`. Finite, also behind an
    adapter's rank."""
    ranks: T
    """int32 [places, parts]: the rank of each adapter in each part of the layer, at most R."""
    ends: T
    """int32 [parts]: where the columns of each part end."""


class AdapterOps(Protocol):
    """What an op set offers of these."""

    def route_adapters(self, adapters: Tensor, rows: Tensor | None, routing: Routing[Tensor]) -> None:
        """Sorts rows by their adapters. adapters int32 [n]: the slot of each token's adapter; one that is no place of
        the routing, as -1, has none. rows int32 [m]: the tokens that the rows of the routing are, None: all of them in
        order. The routing has one choice a row, whose weight is 1."""

    def embed_adapters(self, ids: Tensor, adapters: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
        """out[n, R] = weight[adapters[n], ids[n] - first_row] where there is such a row, else 0: the x of
        `add_adapters` for the embedding, whose inputs are tokens.

        ids, adapters int32 [n], as `route_adapters` has them; weight [places, V_rank, R], float32 or of 16 bits; out
        float32."""

    def add_adapters(self, x: Tensor, weights: AdapterWeights[Tensor], routing: Routing[Tensor], out: Tensor) -> None:
        """out[row] += x[row] · bᵀ, part by part, in rows that have a place; others stay bit for bit.

        x [n, parts · R], of which part p of the product takes columns p · R and on, as many as its rank; out [n, N].
        Sums are float32, and added once they are complete."""
