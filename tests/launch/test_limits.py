"""Limits of the system that are too low are refused with the number; those that can be raised are."""

from __future__ import annotations

import resource

import pytest

from allspan.launch import limits
from allspan.protos.api.errors import ConfigError


class Limits:
    """Those of a process, instead of this one's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda what: self.now)
        monkeypatch.setattr(resource, "setrlimit", self._set)

    def _set(self, what: int, pair: tuple[int, int]) -> None:
        self.now = pair


@pytest.mark.parametrize("hard", [0, 1, 4096, 2**20, limits.FILE_BYTES - 1])
def test_files_too_small_for_shared_memory_are_refused_with_the_number(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Limits(monkeypatch, hard, hard)
    with pytest.raises(ConfigError, match=rf"files of {hard} bytes \(ulimit -f\).*needs {limits.FILE_BYTES}"):
        limits.check_file_size()


def test_a_soft_limit_of_a_file_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Limits(monkeypatch, 4096, resource.RLIM_INFINITY)
    limits.check_file_size()
    assert changed.now == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "after"),
    [
        (1024, 1 << 20, 3328, limits.OPEN_FILES),
        (1024, 4096, 3328, 4096),
        (1024, resource.RLIM_INFINITY, 100_000, 100_000),
        (1 << 19, 1 << 20, 3328, 1 << 19),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 3328, resource.RLIM_INFINITY),
    ],
)
def test_open_files_are_raised_as_far_as_is_needed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, needed: int, after: int
) -> None:
    changed = Limits(monkeypatch, soft, hard)
    limits.allow_many_connections(needed)
    assert changed.now[0] == after
