"""Ranks over TCP: both ends show a certificate of one authority, or nothing is said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from allspan import ClientEngine
from allspan.client.transport.grpc_transport import GrpcTransport
from allspan.launch.certificates import Authority
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError, Unavailable
from allspan.protos.cluster.tls import NO_TLS, TlsFiles
from allspan.protos.worker_pb2_grpc import WorkerStub
from allspan.worker.service.server import RankServer, listen_target
from allspan.worker.service.servicer import RankFacts
from support.certificates import Certificates
from support.fake_core import FakeCore
from support.served_rank import inspect, worker_config

SIZE = 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def files(made: Certificates, name: str = "client", ca: str = "ca") -> TlsFiles:
    return TlsFiles(made.pem(ca), made.pem(name), made.key(name))


@contextlib.contextmanager
def ranks(run_dir: Path, tls: TlsFiles, host: str = "127.0.0.1") -> Iterator[list[str]]:
    """The addresses of two scripted ranks."""
    config = worker_config(run_dir, host)
    config = replace(config, service=replace(config.service, tls=tls))
    made = []
    try:
        for rank in range(SIZE):
            facts = RankFacts(rank, SIZE, "localhost", 512, 1000, (), "reference", "", "0", 1, 0.0, 0, 0)
            made.append(RankServer(FakeCore(rank == 0), facts, config, lambda error: None, inspect))
        yield [server.start() for server in made]
    finally:
        for server in made:
            server.stop()


def test_an_engine_attaches_with_a_certificate_of_the_ranks_authority(
    certificates: Certificates, tmp_path: Path
) -> None:
    with ranks(tmp_path, files(certificates, "server")) as addresses:
        with ClientEngine(attach=addresses, tls=files(certificates)) as engine:
            assert [rank.address for rank in engine.cluster.ranks] == addresses
            assert engine.version() == '1 (kernels "cpu")'
        for wrong in (files(certificates, "foreign"), files(certificates, ca="stranger"), NO_TLS):
            with pytest.raises(Unavailable, match=r"no rank answers at 127.0.0.1:\d+ \(.*TLS"):
                ClientEngine(attach=addresses, tls=wrong, startup_timeout=0)
        with ClientEngine(attach=addresses, tls=files(certificates)) as engine:
            assert engine.is_ready


def test_a_certificate_for_another_host_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    authority = Authority("ca")
    authority.own.write(tmp_path, "ca")
    for name, host in (("rank", "other.example"), ("client", "localhost")):
        authority.issue(name, [host]).write(tmp_path, name)
    ca = str(tmp_path / "ca.pem")
    made = {
        name: TlsFiles(ca, str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key")) for name in ("rank", "client")
    }
    with ranks(tmp_path, made["rank"]) as addresses:
        with pytest.raises(Unavailable, match="must be from the ranks"):
            ClientEngine(attach=addresses, tls=made["client"], startup_timeout=0)
        with ClientEngine(attach=addresses, tls=replace(made["client"], server_name="other.example")) as engine:
            assert engine.is_ready


def test_a_plain_client_learns_nothing(certificates: Certificates, tmp_path: Path) -> None:
    with ranks(tmp_path, files(certificates, "server")) as addresses:
        for address in addresses:
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
                WorkerStub(channel).Status(pb.StatusRequest(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_of_an_open_address_the_hosts_name_is_published(certificates: Certificates, tmp_path: Path) -> None:
    with ranks(tmp_path, files(certificates, "server"), "0.0.0.0") as addresses:
        assert {address.rpartition(":")[0] for address in addresses} == {"localhost"}
        with ClientEngine(attach=addresses, tls=files(certificates)) as engine:
            assert engine.is_ready


def test_each_rank_has_the_next_port(tmp_path: Path) -> None:
    config = worker_config(tmp_path, "127.0.0.1")
    config = replace(config, service=replace(config.service, port=7000))
    assert [listen_target(config, rank) for rank in range(3)] == [f"127.0.0.1:{7000 + rank}" for rank in range(3)]


def test_without_certificates_neither_end_talks_to_another_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without certificates"):
        listen_target(worker_config(tmp_path, "0.0.0.0"), 0)
    for address in ("10.0.0.1:7000", "ipv4:10.0.0.1:7000", "other.example:7000", "[fd00::1]:7000"):
        with pytest.raises(ConfigError, match="with TLS only"):
            GrpcTransport(address)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keyfile": ""}, "keyfile is missing"),
        ({"ca_certs": "/nowhere/ca.pem"}, "ca_certs /nowhere/ca.pem: No such file"),
        ({"certfile": "stranger.pem"}, "KEY_VALUES_MISMATCH"),
        ({"ca_certs": "client.key"}, "no authority, certificate and its key"),
    ],
)
async def test_files_that_do_not_fit_are_refused_by_name(
    certificates: Certificates, change: dict[str, str], words: str
) -> None:
    folder = certificates.folder
    paths = {name: str(folder / value) if value and "/" not in value else value for name, value in change.items()}
    with pytest.raises(ConfigError, match=words):
        GrpcTransport("127.0.0.1:1", replace(files(certificates), **paths))
