"""Ops that are several of `OpSet` in one launch: programs are changed for them on backends that have their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from allspan.kernels.latent_tensors import LatentPages, LatentRooms, LatentWeights, NewLatents
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.router_spec import RouterSpec

if TYPE_CHECKING:
    from allspan.kernels.ops import Rotation, Routing

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


class AdapterMatrices(NamedTuple, Generic[T]):
    """Both matrices of all adapters of a layer: the first as `OpSet.expert_linear` takes it, then those of
    `AdapterWeights`."""

    a: T
    spec: PackedSpec
    panels: T
    ranks: T
    ends: T


class BaseProduct(NamedTuple, Generic[T]):
    """A layer's own product, as `OpSet.packed_linear` takes it, and what becomes of it: "store", "add", or an
    activation of `OpSet.packed_gated_linear`."""

    weight: T
    bias: T | None
    spec: PackedSpec
    epilogue: str


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

    def append_and_attend(
        self,
        q: Tensor,
        new: NewLatents[Tensor],
        rotation: Rotation[Tensor],
        weights: LatentWeights[Tensor],
        pages: LatentPages[Tensor],
        meta: Any,
        rooms: LatentRooms[Tensor],
        out: Tensor,
    ) -> None:
        """`latent_append`, then `latent_attention`: see `with_fused_latents` of allspan.worker.program.fused."""

    def adapted_linear(
        self,
        x: Tensor,
        adapters: AdapterMatrices[Tensor],
        routing: Routing[Tensor],
        base: BaseProduct[Tensor],
        room: Tensor | None,
        out: Tensor,
    ) -> None:
        """`packed_linear` or what else the epilogue says, with what `expert_linear` and `add_adapters` make of x added
        before the activation. room [n, N], in the type of activations, holds anything afterwards; it is there where the
        epilogue is an activation. See `with_fused_adapters` of allspan.worker.program.fused."""
