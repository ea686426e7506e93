"""Choosing a backend: by name, by variant, by what is there."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from pathlib import Path

import pytest

from allspan.kernels import table
from allspan.kernels.errors import BackendUnavailable, StaleModule
from allspan.kernels.table import BACKENDS, REFERENCE, Backend, backends, op_set
from support.kernel_cases import linear

compiled = pytest.mark.skipif(backends() == ("reference",), reason="the compiled kernels are not built")


def test_auto_is_the_best_that_runs_here() -> None:
    assert op_set().name == backends()[0]


def test_the_reference_runs_everywhere() -> None:
    assert op_set("reference").name == backends()[-1] == "reference"


@compiled
def test_the_best_variant_is_named() -> None:
    assert op_set("cpu").name == backends()[0]
    assert backends()[-2] == "cpu/generic"


@compiled
def test_a_variable_forces_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPAN_ISA", "generic")
    assert op_set("cpu").name == "cpu/generic"


@compiled
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_a_forced_instruction_set_that_cannot_run_is_an_error(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPAN_ISA", "sve9")
    with pytest.raises(ValueError, match=r"ALLSPAN_ISA: 'sve9' cannot run here \(this CPU runs .*generic\)"):
        op_set(backend)
    with pytest.raises(BackendUnavailable, match=r"backend: 'sve9' cannot run here"):
        op_set("cpu/sve9")


@compiled
@pytest.mark.parametrize("interface", ["0" * 64, None], ids=["another", "none"])
def test_a_module_compiled_from_other_bindings_is_an_error(
    interface: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bindings").mkdir()
    (tmp_path / "bindings" / "module.cpp").write_text("// one binding more\n")
    (tmp_path / "kernels.h").write_text("// one field more\n")
    monkeypatch.setattr("allspan.kernels.cpu.backend.__file__", str(tmp_path / "backend.py"))
    native = importlib.import_module("allspan.kernels.cpu._native")
    if interface is None:
        monkeypatch.delattr(native, "interface", raising=False)
    else:
        monkeypatch.setattr(native, "interface", interface, raising=False)
    with pytest.raises(StaleModule, match=r"compiled from other bindings.*`pip install \.`.*CONTRIBUTING"):
        op_set("auto")


@compiled
def test_the_module_carries_the_hash_of_the_bindings_that_it_was_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Path(__file__).resolve().parents[2] / "kernels" / "cpu"
    monkeypatch.setattr("allspan.kernels.cpu.backend.__file__", str(sources / "backend.py"))
    assert op_set("cpu").name.startswith("cpu/")


@compiled
def test_without_the_sources_the_module_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = importlib.import_module("allspan.kernels.cpu._native")
    monkeypatch.setattr(native, "interface", "0" * 64, raising=False)
    monkeypatch.setattr("allspan.kernels.cpu.backend.__file__", str(tmp_path / "backend.py"))
    assert op_set("cpu").name.startswith("cpu/")


def test_without_the_compiled_module_auto_says_so_and_uses_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("allspan.kernels.cpu.backend._MODULE", "allspan.kernels.cpu._never_built")
    with caplog.at_level(logging.WARNING):
        assert op_set().name == "reference"
    assert "the compiled kernels are not installed" in caplog.text
    assert backends() == ("reference",)
    with pytest.raises(BackendUnavailable, match="install a C\\+\\+ compiler"):
        op_set("cpu")


def test_an_op_that_a_backend_lacks_comes_from_the_reference_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    partial = Backend({op: target for op, target in REFERENCE.items() if op != "linear"})
    monkeypatch.setattr(table, "BACKENDS", {"toy": partial, **BACKENDS})
    with caplog.at_level(logging.WARNING):
        ops = op_set("toy")
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: backend toy has no linear; using the reference for it"
    ]
    x, weight, bias, out = linear(2, 3, 4)
    ops.linear(x, weight, bias, out)
    assert not out.isnan().any()


@pytest.mark.parametrize(("backend", "threads"), [("gpu9", 1), ("cpu", 0)])
def test_refuses_what_it_does_not_know(backend: str, threads: int) -> None:
    with pytest.raises(ValueError, match=r"backend: 'gpu9' is not known|threads: 0 is not a number of threads"):
        op_set(backend, threads)


@compiled
def test_threads_and_cpus_must_match() -> None:
    with pytest.raises(ValueError, match="cpus: 1 given for 2 threads"):
        op_set("cpu", 2, (0,))


@compiled
def test_the_calling_thread_is_pinned_to_the_first_cpu() -> None:
    cpu = max(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def call() -> None:
        op_set("cpu", 1, (cpu,)).linear(*linear(1, 4, 4))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=30)
    assert seen == [{cpu}]


@compiled
def test_a_cpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cpus: cannot pin to CPU 100000"):
        op_set("cpu", 2, (0, 100000))


@compiled
def test_two_callers_of_one_op_set_take_turns() -> None:
    ops = op_set("cpu", 2)
    _, weight, _, _ = linear(1, 300, 400)
    wrong: list[int] = []

    def call(seed: int) -> None:
        x, _, _, out = linear(3 + seed, 300, 400)
        right = x @ weight.T
        for turn in range(200):
            out.fill_(float("nan"))
            ops.linear(x, weight, None, out)
            if not out.allclose(right, atol=1e-3):
                wrong.append(turn)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong
