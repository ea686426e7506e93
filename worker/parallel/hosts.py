"""Collectives and the plan channel of a world on several hosts: shared memory within a host, MPI between them. The
sums are native code (`kernels/cpu/runtime/host_sums.h`), which describes the algorithm."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allspan.protos.api.errors import InternalError
from allspan.worker.parallel.base import Collectives, GroupCapabilities, PlanChannel, ProgramOps
from allspan.worker.parallel.window import WindowCollectives, deadline, pointer

SplitHosts = Callable[[Any, Any], Any]
"""Given the module MPI and a communicator, makes one of those of its ranks that share a host with this one."""


def by_shared_memory(mpi: Any, comm: Any) -> Any:
    """The communicator of the ranks that can share memory with this one."""
    return comm.Split_type(mpi.COMM_TYPE_SHARED)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which ranks of a world share a host."""

    comm: Any
    """The ranks of this host."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each host, in order; the hosts in the order of their first ranks."""
    mine: int
    """Which of them is this host."""

    @property
    def is_in_order(self) -> bool:
        """Whether the ranks of each host follow one another."""
        return all(ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) for ranks in self.ranks)

    @property
    def slices(self) -> list[tuple[int, ...]]:
        """The equal ranks of all hosts: the first of each, the second of each …, as far as every host has one."""
        return [tuple(column) for column in zip(*self.ranks, strict=False)]


def find_hosts(mpi: Any, comm: Any, all_values: Callable[[int], tuple[int, ...]], split: SplitHosts) -> Hosts:
    """Every rank calls it at once. `all_values` gives every rank's number to all."""
    host = split(mpi, comm)
    (first,) = host.Get_group().Translate_ranks([0], comm.Get_group())
    firsts = all_values(first)
    hosts = sorted(set(firsts))
    ranks = tuple(tuple(rank for rank, each in enumerate(firsts) if each == leader) for leader in hosts)
    return Hosts(host, ranks, hosts.index(first))


class HostSums:
    """The native sums over the ranks of several hosts."""

    def __init__(
        self,
        native: Any,
        mpi: Any,
        comm: Any,
        hosts: Hosts,
        window: WindowCollectives | None,
        spins: int,
        timeout: float,
    ) -> None:
        """`comm`: all ranks, for these sums alone. `window`: of this host's ranks, where it has several."""
        library = ctypes.CDLL(mpi.__file__)  # finds what that is linked with
        names = ("MPI_Isend", "MPI_Irecv", "MPI_Test")
        calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
        self._comm = comm  # outlives its handle
        self._window = window
        self.native = native.HostSums(
            None if window is None else window.window,
            calls,
            mpi._handleof(comm),
            mpi._handleof(mpi.FLOAT),
            mpi._sizeof(mpi.Request),
            mpi._sizeof(mpi.Status),
            hosts.slices,
            comm.rank,
            hosts.mine,
            spins,
            timeout,
        )

    def all_reduce(self, x: Tensor) -> None:
        with deadline():
            self.native.all_reduce(pointer(x, (torch.float32,)), x.numel())

    def close(self) -> None:
        if self._window is not None:
            self._window.close()


class HostCollectives:
    """See `allspan.worker.parallel.base.Collectives`. Sums are native; rows, once a step, go over MPI."""

    def __init__(self, sums: HostSums, rows: Collectives) -> None:
        self.name, self.rank, self.size = rows.name, rows.rank, rows.size
        self._sums, self._rows = sums, rows
        self.capabilities = GroupCapabilities(window=sums.native)
        self.program_ops: ProgramOps = {"all_reduce": self.all_reduce}

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> None:
        self._sums.all_reduce(x)

    def exchange_rows(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        self._rows.exchange_rows(x, widths, out)

    def all_gather_rows(self, x: Tensor, out: Tensor) -> None:
        self._rows.all_gather_rows(x, out)

    def barrier(self) -> None:
        self._rows.barrier()

    def close(self) -> None:
        """Every rank calls it."""
        self._rows.close()
        self._sums.close()


class HostPlanChannel:
    """See `allspan.worker.parallel.base.PlanChannel`. The leader sends a plan to the first rank of every other host,
    which hands it on to its host's ranks when it takes it itself."""

    def __init__(self, between: PlanChannel | None, within: PlanChannel | None) -> None:
        """`between`: of the first ranks of all hosts, None on others; `within`: of the ranks of this host, None where
        it has one."""
        if between is None and within is None:
            raise InternalError("a rank alone on its host takes part in the plans between hosts")
        self._between, self._within = between, within

    def publish(self, data: bytes) -> None:
        for channel in (self._between, self._within):
            if channel is not None:
                channel.publish(data)

    def receive(self, timeout: float) -> bytes | None:
        if self._between is None:
            assert self._within is not None
            return self._within.receive(timeout)
        data = self._between.receive(timeout)
        if data is not None and self._within is not None:
            self._within.publish(data)
        return data

    def expect(self) -> None:
        for channel in (self._between, self._within):
            if channel is not None:
                channel.expect()

    def close(self) -> None:
        for channel in (self._between, self._within):
            if channel is not None:
                channel.close()
