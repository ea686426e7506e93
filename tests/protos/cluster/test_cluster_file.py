"""The files of a run directory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.cluster_file import (
    CLUSTER_FILE,
    ClusterInfo,
    RankInfo,
    error_file,
    rank_file,
    read_cluster,
    read_rank,
    socket_path,
    write_atomically,
    write_cluster,
    write_rank,
)

INFO = ClusterInfo(
    epoch=3,
    state="ready",
    model="smollm2",
    model_path="/models/é",
    max_model_len=8192,
    vocab_size=49152,
    eos_token_ids=(2, 0),
    supervisor_pid=77,
    ranks=(RankInfo(0, 10, "a", "unix:/r/r0"), RankInfo(1, 11, "a", "unix:/r/r1")),
    adapters=(AdapterModule("sql", "/a"), AdapterModule("b", "/c", "base")),
)


def test_a_cluster_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_cluster(tmp_path, INFO)
    assert read_cluster(tmp_path) == INFO
    assert os.listdir(tmp_path) == [CLUSTER_FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ranks": [], "eos_token_ids": [], "surprise": 1}', "null"])
def test_a_file_that_is_no_cluster_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / CLUSTER_FILE).write_text(text)
    with pytest.raises(ConfigError, match=CLUSTER_FILE):
        read_cluster(tmp_path)


def test_no_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cluster to attach to: .*cluster\.json"):
        read_cluster(tmp_path)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = {letter * 50_000 for letter in "ab"}
    write_atomically(path, "a" * 50_000)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_atomically(path, text)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = {path.read_text() for _ in range(300)}
    finally:
        stop.set()
        thread.join(10)
    assert seen <= texts


def test_a_write_that_fails_leaves_the_old_text_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_ranks_write_one_file_an_epoch(tmp_path: Path) -> None:
    info = RankInfo(1, 4242, "host", "unix:/x")
    assert read_rank(tmp_path, 1, 2) is None
    write_rank(tmp_path, info, epoch=2)
    assert read_rank(tmp_path, 1, 2) == info
    assert read_rank(tmp_path, 1, 3) is None
    names = {
        rank_file(tmp_path, 1, 2),
        error_file(tmp_path, 1, 2),
        socket_path(tmp_path, 1, 2),
        rank_file(tmp_path, 1, 3),
    }
    assert len(names) == 4
