"""How the second matrix of a low-rank adapter lies: columns of a layer's product in panels, which are read as one
stretch of memory each.

    [panels][rank][64 columns]

Panels hold the columns of one part of the layer; the last one of a part is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

COLUMNS = 64
"""Columns of a panel."""


def panels_of(parts: Sequence[int]) -> int:
    """Returns the number of panels of a layer whose parts have so many outputs."""
    return sum(-(-part // COLUMNS) for part in parts)


def put_rows(rows: Tensor, parts: Sequence[int], part: int, into: Tensor) -> None:
    """Writes one part's rows of the matrix, [outputs, rank], to their panels: into [panels, R, 64], with R of at least
    the rank; what is not given becomes 0."""
    first, outputs, rank = panels_of(parts[:part]), *rows.shape
    own = into[first : first + panels_of([outputs])]
    own[:, rank:] = 0
    whole = outputs // COLUMNS
    own[:whole, :rank] = rows[: whole * COLUMNS].view(whole, COLUMNS, rank).transpose(1, 2)
    for last in own[whole:]:
        last[:rank, outputs % COLUMNS :] = 0
        last[:rank, : outputs % COLUMNS] = rows[whole * COLUMNS :].T


def rows_of(panels: Tensor, parts: Sequence[int], part: int) -> Tensor:
    """Returns one part's rows of the matrix, [outputs, R], of panels [panels, R, 64]."""
    first = panels_of(parts[:part])
    own = panels[first : first + panels_of([parts[part]])]
    return own.transpose(1, 2).reshape(-1, panels.shape[1])[: parts[part]]
