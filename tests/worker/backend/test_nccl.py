"""How ranks on several hosts find each other for NCCL; needs no GPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from allspan.worker.backend.cuda.nccl import meet, own_address


def test_ranks_meet_at_a_port_of_the_first_on_its_address_in_the_ranks_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "127.0.0.0/8")
    told: list[bytes] = [b"", b""]
    barrier = threading.Barrier(2)

    def run(rank: int) -> bytes:
        def share(data: bytes) -> list[bytes]:
            told[rank] = data
            barrier.wait(20)
            return list(told)

        store = meet(rank, 2, share, 20.0)
        store.set(str(rank), f"of {rank}")
        found = bytes(store.get(str(1 - rank)))
        barrier.wait(20)  # the first rank's store answers the other's question as long as it lives
        return found

    with ThreadPoolExecutor(2) as pool:
        found = [future.result(30) for future in [pool.submit(run, rank) for rank in range(2)]]
    assert found == [b"of 1", b"of 0"]
    assert told[0].startswith(b"127.0.0.1 ")


def test_all_ranks_hear_that_the_first_has_no_port() -> None:
    with pytest.raises(RuntimeError, match="could not open a port"):
        meet(1, 2, lambda data: [b"", data], 5.0)


def test_a_network_that_is_an_interface_leaves_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    assert own_address("eth0") == own_address("") == "node1"
