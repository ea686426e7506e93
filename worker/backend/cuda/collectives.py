"""Collectives of ranks that have a GPU each: sums stay on the GPUs, and small tensors go through the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allspan.kernels.cuda.comm import ipc
from allspan.kernels.cuda.comm.all_reduce import MOST_RANKS, AllReduce, arena_parts
from allspan.kernels.cuda.jit.modules import HALVES, is_noting
from allspan.kernels.errors import BackendUnavailable
from allspan.protos.api.errors import DeadlineExceeded
from allspan.worker.backend.cuda.event_wait import DEFAULT_WAITER, EventWaiter
from allspan.worker.backend.cuda.nccl import Nccl, open_nccl
from allspan.worker.backend.cuda.staged import StagedCollectives
from allspan.worker.parallel.base import Collectives, GroupCapabilities, ProgramOps

NCCL_BYTES = 16 << 20
"""From here on NCCL is the faster: every byte of a long message goes over NVLink as often, and NCCL keeps it busier."""

Share = Callable[[bytes], list[bytes]]
"""Gives every rank each rank's bytes (at most 1 KiB, no zero byte at their end); all ranks call it at once."""

_MOST_SHARED = 1024


class Arenas:
    """One's own memory and that of the peers, opened; see `allspan.kernels.cuda.comm.all_reduce`."""

    def __init__(self, own: ipc.OwnMemory, rank: int, handles: Sequence[bytes]) -> None:
        """Raises BackendUnavailable; then nothing stays open."""
        self.own = own
        self._closers: list[Callable[[], None]] = []
        self.addresses: list[int] = []
        try:
            for peer, handle in enumerate(handles):
                address = own.address
                if peer != rank:
                    address, close = ipc.open_memory(handle)
                    self._closers.append(close)
                self.addresses.append(address)
        except BackendUnavailable:
            self.close_peers()
            raise

    def close_peers(self) -> None:
        for close in self._closers:
            close()
        self._closers.clear()


class GpuCollectives:
    """See `allspan.worker.parallel.base.Collectives`; tensors lie on the GPU or on the host. What lies on the GPU is
    summed by `direct` (in rank order), from NCCL_BYTES on by `nccl` (in an order of its own), by what there is of
    them, or on the host."""

    def __init__(
        self,
        host: Collectives,
        direct: AllReduce | None,
        nccl: Nccl | None,
        arenas: Arenas | None,
        waiter: EventWaiter = DEFAULT_WAITER,
    ) -> None:
        self.name, self.rank, self.size = host.name, host.rank, host.size
        self._host = StagedCollectives(host, waiter)
        self._direct, self._nccl, self._arenas = direct, nccl, arenas
        self._alone: AllReduce | None = None
        self.capabilities = GroupCapabilities(fused_norms=HALVES, is_capturable=direct is not None)
        ops: ProgramOps = {
            "all_reduce": self.all_reduce,
            "all_reduce_add_rms_norm": self.all_reduce_add_rms_norm,
        }
        self.program_ops = ops if direct is None else {**ops, "all_gather_columns": self.all_gather_columns}

    def all_reduce(self, x: Tensor) -> None:
        if x.device.type == "cuda" and self._direct is None and is_noting():
            return  # nobody wants the sum; to bring it through the host takes seconds
        if x.device.type == "cpu" or (self._direct is None and self._nccl is None):
            self._host.all_reduce(x)
        elif self._nccl is not None and not self._is_direct(x):
            self._nccl.all_reduce(x)
        elif self._direct is not None:
            self._direct.all_reduce(x)

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """all_reduce(x), then `add_rms_norm` of `allspan.kernels.ops`, in one kernel where it pays; the bits of the
        norm do not tell. x, out: of 16 bits on the GPU; x may be left as it is."""
        if self._direct is not None and self._is_direct(x):
            self._direct.all_reduce_add_rms_norm(x, residual, weight, eps, out)
        else:
            self.all_reduce(x)
            if self._alone is None:
                self._alone = self._direct or AllReduce(0, [0], x.device)
            self._alone.add_rms_norm(x, residual, weight, eps, out)

    def all_gather_columns(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        """out[m, sum(widths)] = every rank's x [m, widths[rank]], side by side; float32 on the GPU. Only where
        GPUs reach each other's memory."""
        assert self._direct is not None
        self._direct.all_gather_columns(x, widths, out)

    def _is_direct(self, x: Tensor) -> bool:
        """NCCL in a captured graph would have to be asked about it."""
        return self._direct is not None and (self._nccl is None or x.nbytes < NCCL_BYTES or _is_capturing())

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        self._host.exchange_rows(x, widths, out)
        self.check()

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        self._host.all_gather_rows(x, out)
        self.check()

    def barrier(self) -> None:
        self._host.barrier()
        self.check()

    def check(self) -> None:
        """Raises DeadlineExceeded once a GPU has waited too long for a peer; it is all one can do to give up. Costs no
        time; each call that goes through the host makes it."""
        if self._direct is not None and (late := self._direct.given_up) is not None:
            raise DeadlineExceeded(f"the GPU of rank {self.rank} waited too long for rank {late} in all_reduce")

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()
        if self._arenas is not None:
            torch.cuda.synchronize()
            self._host.barrier()  # nobody is being written to any more
            _free(self._arenas.own, self._arenas, self._host)
        self._host.close()


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def join_gpus(
    host: Collectives, share: Share, timeout_s: float, why_not: str = "", nccl: Callable[..., Nccl | None] = open_nccl
) -> tuple[GpuCollectives, str, str]:
    """The collectives, their kind ("ipc", "nccl" or "staged"), and why it is not the first ("" for that).

    Every rank calls it at once, and all get the same kind. `why_not`: what is known to speak against the first.
    """
    opened = nccl(host.rank, host.size, share, timeout_s)
    if host.size > MOST_RANKS:
        why_not = why_not or f"there are more than {MOST_RANKS} ranks"
    arenas: Arenas | None = None
    if not why_not:
        arenas, why_not = _open_arenas(host, share)
    if arenas is not None:
        direct = AllReduce(host.rank, arenas.addresses, "cuda", timeout_s)
        host.barrier()  # nobody sends before all are there
        return GpuCollectives(host, direct, opened, arenas, EventWaiter(timeout_s)), "ipc", ""
    kind = "staged" if opened is None else "nccl"
    return GpuCollectives(host, None, opened, None, EventWaiter(timeout_s)), kind, why_not


def _open_arenas(host: Collectives, share: Share) -> tuple[Arenas | None, str]:
    """None where a rank cannot, and the first reason."""
    own: ipc.OwnMemory | None = None
    arenas: Arenas | None = None
    why_not = handle = ""
    try:
        flags, inboxes, stagings = arena_parts(host.size)
        own = ipc.take(((flags, 0), (inboxes, 0xFF), (stagings, 0)))
        handle = own.handle.hex()
    except BackendUnavailable as error:
        why_not = str(error)
    handles = [each.decode() for each in share(handle.encode())]
    if own is not None and all(handles):
        try:
            arenas = Arenas(own, host.rank, [bytes.fromhex(each) for each in handles])
        except BackendUnavailable as error:
            why_not = str(error)
    failures = [each.decode(errors="replace") for each in share(why_not.encode()[:_MOST_SHARED])]
    why_not = next((each for each in failures if each), "")
    if why_not:
        _free(own, arenas, host)
        arenas = None
    return arenas, why_not


def _free(own: ipc.OwnMemory | None, arenas: Arenas | None, host: Collectives) -> None:
    """Every rank calls it: nobody frees what another has open."""
    if arenas is not None:
        arenas.close_peers()
    host.barrier()
    if own is not None:
        own.free()
