"""Sums over the GPUs of one host, each a process or a stream of its own: see all_reduce.cu for how they meet."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import HALVES, Kernel, element_macro, gpu, kernel, launch

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

MOST_RANKS = 8
PUSH_BYTES = {1: 0, 2: 2 << 20, 3: 512 << 10, 4: 512 << 10, 5: 192 << 10, 6: 192 << 10, 7: 128 << 10, 8: 128 << 10}
"""Longest message that goes straight to every peer, by the number of ranks. A longer one goes in slices, which takes
another trip over NVLink (some 2 µs), and fewer bytes where there are more than two ranks."""
STAGING_BYTES = 8 << 20
"""Longest piece of a message that goes in slices."""
MOST_WIDTH = 8 * 512 * 4
"""Most elements of a row that is normed."""
PATIENCE_S = 10.0
"""How long a GPU waits for a peer, unless told otherwise."""

_FLAG_BYTES, _MOST_BLOCKS = 2 * 8 * 128 * 4, 128
_THREADS = 256
_CAPACITIES = (2, 4, 8)
"""Ranks that kernels are compiled for; fewer use those for the next."""
_PER = (1, 2, 4)
"""Packets of a row that a thread may hold."""


def kernel_variants(capability: tuple[int, int]) -> Iterable[Kernel]:
    """See variants.py."""
    for ranks in (1, *_CAPACITIES):
        yield from (_kernel("push_reduce", ranks, norm=1, per=per) for per in _PER)
        if ranks > 1:
            yield from (_kernel(name, ranks, wide) for name in ("push_reduce", "share_reduce") for wide in (0, 1))
            yield _kernel("gather_columns", ranks, wide=1)
            halves = element_macro(torch.float16)
            yield from (_kernel(name, ranks, **halves) for name in ("push_reduce", "share_reduce"))
            yield from (_kernel("push_reduce", ranks, norm=1, per=per, **halves) for per in _PER)
    yield from (_kernel("push_reduce", 1, norm=1, per=per, **element_macro(torch.float16)) for per in _PER)


def _kernel(name: str, ranks: int, wide: int = 0, norm: int = 0, per: int = 1, **kind: int) -> Kernel:
    return kernel("comm/all_reduce.cu", name, RANKS=ranks, WIDE=wide, NORM=norm, PER=per, **kind)


def arena_parts(ranks: int) -> tuple[int, int, int]:
    """Bytes of a rank's arena: flags, which are zero at first, inboxes, which are 0xff at first, and stagings."""
    return _FLAG_BYTES, 2 * _capacity(ranks) * PUSH_BYTES[ranks], 2 * STAGING_BYTES


class AllReduce:
    """One rank's end. Every rank makes the same calls in the same order, on one stream each; they can be captured into
    graphs. Sums run in rank order in float32 and are rounded once: the same bits on every rank, for every size and
    fused or not.
    """

    def __init__(
        self,
        rank: int,
        arenas: Sequence[int],
        device: torch.device | str,
        patience_s: float = PATIENCE_S,
        most_blocks: int = _MOST_BLOCKS,
    ) -> None:
        """`arenas`: where this device sees each rank's arena, this one's own included, filled as `arena_parts` says
        before any rank makes a call. All blocks of a launch, at most `most_blocks`, must find room on the device at
        once, those of ranks that share it too. Raises ValueError for more than MOST_RANKS."""
        ranks = len(arenas)
        if not 0 <= rank < ranks <= MOST_RANKS:
            raise ValueError(f"rank {rank} of {ranks}: at most {MOST_RANKS} GPUs can sum without NCCL")
        self.rank, self.ranks = rank, ranks
        self.push_bytes = PUSH_BYTES[ranks]
        self._blocks = min(gpu(torch.device(device)).multiprocessors, most_blocks, _MOST_BLOCKS)
        self._state = torch.zeros(4, dtype=torch.int32, device=device)
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=self._state.is_cuda)
        self._error_view = self._error.numpy()
        sizes = (self.push_bytes, STAGING_BYTES)
        addresses = [*arenas, *[0] * (MOST_RANKS - ranks), arenas[rank], self._state.data_ptr(), self._error.data_ptr()]
        self._shared = struct.pack("<14Q2i", *addresses, *sizes, int(patience_s * 1e9), rank, ranks)
        """The kernels' `Shared`."""

    @property
    def given_up(self) -> int | None:
        """The rank that did not come in time; what was summed since is wrong. Read without waiting for the GPU."""
        return int(self._error_view[0]) - 1 if self._error_view[0] else None

    def all_reduce(self, x: Tensor) -> None:
        """x: contiguous bfloat16, float16 or float32 of any shape; becomes the sum of every rank's, in place.

        Raises ValueError for what does not fit, BackendUnavailable without CuPy.
        """
        flat, packet = _flat(x), 16 // x.element_size()  # elements that are sent as one
        if self.ranks == 1 or not len(flat):
            return
        if x.nbytes <= self.push_bytes:
            packets = -(-len(flat) // packet)
            threads = min(_THREADS, -(-packets // 32) * 32)
            rows = -(-packets // threads)
            what = _kernel("push_reduce", _capacity(self.ranks), int(packet == 4), **element_macro(x.dtype))
            sizes = (np.int64(rows), np.int32(threads), np.int64(len(flat)))
            nothing = (None, None, np.float32(0), None)
            launch(what, (min(self._blocks, rows),), threads, (self._shared, x, *sizes, *nothing), shared_bytes=256)
            return
        for piece in torch.split(flat, STAGING_BYTES // x.element_size()):
            packets = -(-len(piece) // (packet * self.ranks))  # of a slice
            threads = min(_most_threads(self.ranks), -(-packets // 32) * 32)
            blocks = min(self._blocks, -(-packets // threads))
            what = _kernel("share_reduce", _capacity(self.ranks), int(packet == 4), **element_macro(x.dtype))
            launch(what, (blocks,), threads, (self._shared, piece, np.int64(len(piece))))

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += the sum of every rank's x, rounded to its type; then out = rms_norm(residual).

        x, out: bfloat16 or float16 [n, H], H a multiple of 8; residual float32 [n, H]; weight float32 [H]; all
        contiguous. `out` may be `x`, which is otherwise left alone or becomes the sum.

        Raises ValueError for what does not fit, BackendUnavailable without CuPy.
        """
        fits = x.nbytes <= self.push_bytes
        if not fits:
            self.all_reduce(x)
        self._norm(_capacity(self.ranks) if fits else 1, x, residual, weight, eps, out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """What comes after the sum, for an x that has been summed: with the bits of `all_reduce_add_rms_norm`."""
        self._norm(1, x, residual, weight, eps, out)

    def all_gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor) -> None:
        """out[m, sum(widths)] = every rank's x [m, widths[rank]], side by side. float32, contiguous.

        Raises ValueError for what does not fit, BackendUnavailable without CuPy.
        """
        rows, width = len(x), sum(widths)
        if len(widths) != self.ranks or x.shape != (rows, widths[self.rank]) or out.shape != (rows, width):
            raise ValueError(f"x: {tuple(x.shape)} of {tuple(widths)} columns does not go into {tuple(out.shape)}")
        if x.dtype is not torch.float32 or out.dtype is not torch.float32:
            raise ValueError(f"x: {x.dtype} and out: {out.dtype} must be float32")
        for tensor in (x, out):
            _flat(tensor)
        packets = -(-max(widths) // 4)
        columns = struct.pack("<9i", *accumulate((0, *widths)), *[0] * (MOST_RANKS - self.ranks))
        piece = max(1, STAGING_BYTES // (16 * packets))
        for first in range(0, rows, piece):
            count = min(piece, rows - first)
            threads = min(_most_threads(self.ranks), 512, -(-packets * count // 32) * 32)
            blocks = min(self._blocks, -(-packets * count // threads))
            arguments = (self._shared, columns, x[first:], out[first:], np.int64(count))
            launch(_kernel("gather_columns", _capacity(self.ranks), wide=1), (blocks,), threads, arguments)

    def _norm(self, ranks: int, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        _check_norm(x, residual, weight, out)
        rows, width = x.shape
        if rows:
            packets = width // 8
            per = next(per for per in _PER if packets <= per * _most_threads(self.ranks))
            threads = -(-packets // (32 * per)) * 32
            what = _kernel("push_reduce", ranks, norm=1, per=per, **element_macro(x.dtype))
            sizes = (np.int64(rows), np.int32(packets), np.int64(x.numel()))
            after = (residual, weight, np.float32(eps), out)
            launch(what, (min(self._blocks, rows),), threads, (self._shared, x, *sizes, *after), shared_bytes=256)


def _capacity(ranks: int) -> int:
    return next((capacity for capacity in _CAPACITIES if 1 < ranks <= capacity), 1)


def _most_threads(ranks: int) -> int:
    """Returns the most threads of a block: more ranks take more registers."""
    return 512 if ranks > 4 else 1024


def _flat(x: Tensor) -> Tensor:
    if x.dtype not in (*HALVES, torch.float32) or not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(
            f"x: {x.dtype} {tuple(x.shape)} of strides {x.stride()} must be contiguous bfloat16, float16 or float32 "
            "that begins at a multiple of 16 bytes"
        )
    return x.view(-1)


def _check_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
    rows, width = x.shape
    kind = x.dtype if x.dtype in HALVES else torch.bfloat16
    wanted = (
        ("x", x, kind, (rows, width)),
        ("residual", residual, torch.float32, (rows, width)),
        ("weight", weight, torch.float32, (width,)),
        ("out", out, kind, (rows, width)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} must be contiguous {dtype} {shape}")
    if width % 8 or width > MOST_WIDTH:
        raise ValueError(f"x: rows of {width} elements must be a multiple of 8, at most {MOST_WIDTH}")
