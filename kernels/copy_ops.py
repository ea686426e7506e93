"""Ops that copy rows or columns; the rest of the op set is in `allspan.kernels.ops`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class CopyOps(Protocol):
    """Each signature is the contract that every backend meets, as in `OpSet`."""

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[m, H] = x[rows]; rows int32 [m]."""

    def put_rows(self, x: Tensor | None, rows: Tensor | None, scale: float, out: Tensor) -> None:
        """out[rows] = scale · x, with x float32 [m, H] and rows int64 [m], in host memory or where `out` is; nothing
        where both are None."""

    def gather_columns(self, x: Tensor, columns: Tensor, out: Tensor) -> None:
        """out[n, m] = x[:, columns]; columns int32 [m]."""

    def put_columns(self, x: Tensor, first: int, out: Tensor) -> None:
        """out[:, first : first + m] = x, with x [n, m] and out [n, M], float32 or the activations' dtype; the other
        columns stay."""
