"""OwnRows: an attention sublayer whose rows are those of one rank's own requests, with all heads (data-parallel
attention). The other sublayers compute the rows of all ranks, so its product is put between zeros and summed."""

from __future__ import annotations

from allspan.worker.models.sublayer import Stream, Sublayer
from allspan.worker.program.program import Rows, Slot


class OwnRows(Sublayer):
    """A rank without rows of its own only takes part in the sum, to which it adds zeros."""

    _whole: Stream
    """The rows of all ranks."""

    def normed(self) -> Slot:
        """What the block reads: the own rows of the normed residual stream."""
        program, x = self.program, super().normed()
        self._whole = self.stream
        own = self._builder.buffer("x", Rows.OWN, program.width(x))
        program.op("gather_rows", x, program.input("own_rows", Rows.OWN), own)
        self.stream = Stream(Rows.OWN, self.stream.residual, own)
        return own

    def target(self, sums_ranks: bool) -> Slot:
        """Never the residual stream, which has the rows of all ranks."""
        return self.output

    def add(self, sums_ranks: bool) -> None:
        """Has `output` spread over the rows of all ranks, summed, and added as on a rank that has them all."""
        program, own, self.stream = self.program, self.stream.x, self._whole
        # Rows looked up by number, 0 for those of others: an embedding of which every rank has other rows.
        program.op("embedding", program.input("own_places"), own, 0, self.stream.x)
        super().add(sums_ranks=True)
