"""Products with a low-rank adapter for each row, in the shape of Punica's SGMV and BGMV (L. Chen et al.,
arXiv:2310.18547), on a GPU or a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS, panels_of, put_rows
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters.expand import expand
from allspan.kernels.cuda.adapters.route import route_adapters
from allspan.kernels.cuda.adapters.shrink import shrink
from allspan.kernels.library.arrays import Array, anywhere, ints, tensor
from allspan.kernels.ops import Routing
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.packer import Packer, Target
from allspan.kernels.table import BACKENDS, op_set

if TYPE_CHECKING:
    from allspan.kernels.ops import OpSet

_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class _Products(Protocol):
    """What a backend does with rows that are sorted by adapter."""

    def route(self, indices: Tensor, routing: Routing[Tensor]) -> None: ...

    def add(self, x: Tensor, weights: LoRAWeights, routing: Routing[Tensor], y: Tensor) -> None: ...


class LoRAWeights:
    """The matrices of several adapters of one layer, laid out for the kernels: a [adapters, rank, inputs], b [adapters,
    outputs, rank], in float16 or bfloat16, on CPUs also float32. Changing a or b afterwards changes nothing."""

    def __init__(self, a: Array, b: Array, ranks: Array | None = None, backend: str = "auto") -> None:
        """ranks: int32 [adapters], where adapters have fewer than there is room for; what is behind them is not read.

        backend: one of allspan's ("cuda", "cpu", "cpu/avx2", "reference", …); "auto": the fastest on a's device.
        Raises ValueError for shapes that do not go together.
        """
        first, second = anywhere("a", a), anywhere("b", b)
        is_stack = first.ndim == second.ndim == 3 and first.shape[:2] == second.shape[::2]
        if not is_stack or first.dtype is not second.dtype or first.dtype not in _FORMATS:
            shapes = f"a {first.dtype} {tuple(first.shape)} and b {second.dtype} {tuple(second.shape)}"
            raise ValueError(f"a: {shapes} are not [adapters, rank, inputs] and [adapters, outputs, rank] of one dtype")
        if backend not in ("auto", "cuda") and backend.partition("/")[0] not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is not known (auto, {', '.join(BACKENDS)})")
        is_gpu = backend == "cuda" or (backend == "auto" and first.is_cuda)
        self.num_adapters, self.rank, self.inputs = first.shape
        self.outputs, self.dtype, self.device = second.shape[1], first.dtype, first.device
        if is_gpu:
            tensor("a", first)
        ops = None if is_gpu else op_set(backend)
        self.products: _Products = _Gpu() if ops is None else _Cpu(ops)
        name = _FORMATS[self.dtype]
        memory = "rows" if is_gpu else "panels"
        if name == "f16" and not is_gpu:
            raise ValueError(f"a: {self.dtype} is for GPUs; give bfloat16 or float32")
        self.spec = PackedSpec(name, name, (self.rank,), self.inputs, memory=memory)
        given = torch.full((self.num_adapters,), self.rank) if ranks is None else anywhere("ranks", ranks)
        if tuple(given.shape) != (self.num_adapters,) or int(given.min()) < 0 or int(given.max()) > self.rank:
            raise ValueError(f"ranks: {given.tolist()} are not from 0 to {self.rank} for {self.num_adapters} adapters")
        self.a = torch.zeros(self.num_adapters, *self.spec.shape, dtype=torch.uint8, device=self.device)
        panels = torch.zeros(
            self.num_adapters, panels_of([self.outputs]), self.rank, COLUMNS, dtype=self.dtype, device=self.device
        )
        packer = Packer(None if ops is None else ops.runtime)
        for adapter, rank in enumerate(given.tolist()):
            own = first[adapter].clone()
            own[rank:] = 0
            packer.floats(own, Target(self.spec, 0, 0, self.a[adapter]))
            put_rows(second[adapter, :, :rank].cpu(), [self.outputs], 0, panels[adapter])
        own_ranks = given.view(-1, 1).to(self.device, torch.int32)
        self.second = AdapterWeights(panels, own_ranks, torch.tensor([self.outputs], dtype=torch.int32).to(self.device))
        """See `AdapterOps.add_adapters`."""


def bgmv(y: Array, x: Array, weights: LoRAWeights, indices: Array) -> None:
    """y[i] += b[indices[i]] · (a[indices[i]] · x[i]), in float32 until it is added; an index that is no adapter's, such
    as -1, leaves its row as it is.

    x [n, inputs] of the weights' dtype; y [n, outputs] of that or float32; indices int32 [n], read on the device: a
    captured CUDA graph goes on with what they hold then.
    """
    into, rows = _checked(y, x, weights)
    own = ints("indices", indices, rows.device)
    if tuple(own.shape) != (len(rows),):
        raise ValueError(f"indices: {tuple(own.shape)} are not ({len(rows)},)")
    weights.products.add(rows, weights, routed(weights, own), into)


def routed(weights: LoRAWeights, indices: Tensor) -> Routing[Tensor]:
    """Returns rows sorted by their adapters, whose indices are int32 [n]: all layers of a step can have the same."""
    count, device = len(indices), indices.device
    integers = torch.empty(2, count, 1, dtype=torch.int32, device=device)
    starts = torch.empty(1, weights.num_adapters + 1, dtype=torch.int32, device=device)
    routing = Routing(integers[0], torch.empty(count, 1, device=device), integers[1], starts)
    weights.products.route(indices, routing)
    return routing


def sgmv(y: Array, x: Array, weights: LoRAWeights, seg_indptr: Array, weight_indices: Array) -> None:
    """`bgmv` of segments of neighbouring rows: rows seg_indptr[s] up to seg_indptr[s + 1] have adapter
    weight_indices[s]. seg_indptr int32 [segments + 1], ascending, weight_indices int32 [segments]; rows past the last
    segment stay as they are."""
    device = anywhere("x", x).device
    indptr, chosen = ints("seg_indptr", seg_indptr, device), ints("weight_indices", weight_indices, device)
    if len(indptr) != len(chosen) + 1:
        raise ValueError(f"seg_indptr: {len(indptr)} of them do not go with {len(chosen)} weight_indices")
    rows = torch.arange(len(anywhere("x", x)), dtype=torch.int32, device=device)
    segments = torch.searchsorted(indptr, rows, right=True, out_int32=True)
    # Before the first segment, and behind the last, there is none.
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
    bgmv(y, x, weights, torch.cat((nobody, chosen, nobody)).index_select(0, segments))


def _checked(y: Array, x: Array, weights: LoRAWeights) -> tuple[Tensor, Tensor]:
    into, rows = anywhere("y", y), anywhere("x", x)
    if rows.dtype is not weights.dtype or rows.shape[1:] != (weights.inputs,) or not rows.is_contiguous():
        wanted = f"contiguous {weights.dtype} (n, {weights.inputs})"
        raise ValueError(f"x: {rows.dtype} {tuple(rows.shape)} is not {wanted}")
    fits = into.dtype in (torch.float32, weights.dtype) and into.is_contiguous()
    if not fits or tuple(into.shape) != (len(rows), weights.outputs):
        wanted = f"contiguous {weights.dtype} or float32 ({len(rows)}, {weights.outputs})"
        raise ValueError(f"y: {into.dtype} {tuple(into.shape)} is not {wanted}")
    if into.device != weights.device or rows.device != weights.device:
        raise ValueError(f"x: on {rows.device}, y on {into.device}, but the weights are on {weights.device}")
    return into, rows


class _Gpu:
    def route(self, indices: Tensor, routing: Routing[Tensor]) -> None:
        route_adapters(indices, None, routing)

    def add(self, x: Tensor, weights: LoRAWeights, routing: Routing[Tensor], y: Tensor) -> None:
        expand(shrink(x, weights.a, weights.spec, routing), weights.second, routing, y)


class _Cpu:
    def __init__(self, ops: OpSet) -> None:
        self._ops = ops

    def route(self, indices: Tensor, routing: Routing[Tensor]) -> None:
        self._ops.route_adapters(indices, None, routing)

    def add(self, x: Tensor, weights: LoRAWeights, routing: Routing[Tensor], y: Tensor) -> None:
        """Ops of CPUs take float32."""
        low = torch.zeros(len(x), 1, weights.rank)
        self._ops.expert_linear(x.float(), weights.a, None, weights.spec, 0, routing, low)
        total = y.float()
        self._ops.add_adapters(low[:, 0], weights.second, routing, total)
        if total is not y:
            y.copy_(total)
