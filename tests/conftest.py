"""Counts and names what was skipped; with ALLSPAN_REQUIRE_TOOLS=1 (continuous integration) a skip is a failure, unless
the test needs what nobody can install: a GPU ("gpu: …"), another CPU ("cpu: …"), or the rights of root where the suite
runs without them ("root: …": mounts, network namespaces and control groups; run as root, such a skip is a failure like
any other)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import artefacts, node_client

HERE = Path(__file__).parent
TIMED_FAULTS = ("deaths", "hosts", "inside", "lost_hosts", "networks", "overload", "resume", "silence", "stops")
ALONE = (
    *(HERE / "faults" / f"test_{name}.py" for name in TIMED_FAULTS),
    *(HERE / "cluster" / f"test_{name}.py" for name in ("observing", "gpus", "gpu_faults")),
)
"""Files whose tests want the machine to themselves: they measure how long real processes take."""

# How long an example takes to draw says how busy the machine is, not whether the code is right.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

_skipped: pytest.StashKey[Counter[str]] = pytest.StashKey()


class Skips:
    """Counts them where reports arrive: with several processes, in the one that started the others."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._counts[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the tests of Engine run")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_skipped] = Counter()
    config.pluginmanager.register(Skips(config.stash[_skipped]))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in ALONE:
            item.add_marker("alone")


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node.js scripts of the tests beside their packages; skips where that cannot be had."""
    return node_client.install(tmp_path_factory.mktemp("node"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("gpu: no CUDA device here")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not hasattr(session.config, "workerinput"):  # once, not in every process of xdist
        artefacts.prune()
    wanting = [reason for reason in session.config.stash[_skipped] if not _is_excused(reason)]
    if wanting and exitstatus == 0 and os.environ.get("ALLSPAN_REQUIRE_TOOLS") == "1":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in sorted(config.stash[_skipped].items()):
        excused = _is_excused(reason) or os.environ.get("ALLSPAN_REQUIRE_TOOLS") != "1"
        verdict = "" if excused else " (a failure here)"
        terminalreporter.write_line(f"skipped {count}{verdict}: {reason}")


def _is_excused(reason: str) -> bool:
    return reason.startswith(("gpu:", "cpu:")) or (reason.startswith("root:") and os.geteuid() != 0)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
