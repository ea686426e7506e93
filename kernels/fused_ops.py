"""Ops that are several of `OpSet` in one launch: programs are changed for them on backends that have their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from allspan.kernels.router_spec import RouterSpec

if TYPE_CHECKING:
    from allspan.kernels.ops import Routing

T = TypeVar("T")
"""Tensor, or what stands for one while a program is built."""


class RowNorm(NamedTuple, Generic[T]):
    """RMSNorm as `OpSet.rms_norm` takes it."""

    weight: T
    eps: float


class RouterProduct(NamedTuple, Generic[T]):
    """A router's linear layer, as `OpSet.linear` takes it, and where its logits go."""

    weight: T
    bias: T | None
    logits: T


class ExpertChoice(NamedTuple, Generic[T]):
    """How `OpSet.route` chooses from logits."""

    bias: T | None
    places: T
    spec: RouterSpec


class FusedOps(Protocol):
    """What an op set offers of these."""

    def norm_route(
        self,
        residual: Tensor,
        norm: RowNorm[Tensor],
        x: Tensor,
        product: RouterProduct[Tensor],
        choice: ExpertChoice[Tensor],
        routing: Routing[Tensor],
        load: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """`rms_norm` of the residual stream, written to x, `linear` of that with the router's weight, and `route`: see
        `with_fused_routers` of allspan.worker.program.fused."""
