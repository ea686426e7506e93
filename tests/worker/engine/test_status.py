"""The states of an engine: which may follow which, and what callers are told in each."""

from __future__ import annotations

import pytest

from allspan.protos.api.errors import InternalError, Unavailable
from allspan.worker.engine.status import TRANSITIONS, EngineState, EngineStatus

S = EngineState


def status_in(state: EngineState) -> EngineStatus:
    status = EngineStatus(1)
    if state is not S.RUNNING:
        status.move(state, "a cause")
    return status


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
def test_only_the_transitions_of_the_table_happen(before: EngineState, after: EngineState) -> None:
    status, cause = status_in(before), "" if after is S.RUNNING else "another cause"
    if after in (before, *TRANSITIONS[before]):
        status.move(after, cause)
        assert (status.state, status.cause) == (after, cause)
    else:
        with pytest.raises(InternalError, match=f"{before.value} cannot become {after.value}"):
            status.move(after, cause)
        assert status.state is before


@pytest.mark.parametrize(("state", "cause"), [(S.STOPPED, ""), (S.RUNNING, "a cause")])
def test_a_cause_is_there_exactly_while_requests_are_refused(state: EngineState, cause: str) -> None:
    with pytest.raises(InternalError, match="has the cause"):
        EngineStatus(1).move(state, cause)


@pytest.mark.parametrize(
    ("state", "report", "is_ending", "has_ended"),
    [
        (S.RUNNING, "running", False, False),
        (S.STOPPED, "stopped", False, False),
        (S.CLOSING, "stopped", True, False),
        (S.ENDED, "stopped", True, True),
        (S.FAILED, "failed", True, True),
    ],
)
def test_each_state_answers_its_queries(state: EngineState, report: str, is_ending: bool, has_ended: bool) -> None:
    status = status_in(state)
    assert (status.report, status.is_ending, status.has_ended) == (report, is_ending, has_ended)
    if is_ending:
        with pytest.raises(Unavailable, match="a cause"):
            status.check_alive()
    else:
        status.check_alive()


@pytest.mark.parametrize(
    ("failure", "told"),
    [(RuntimeError("no memory"), "RuntimeError: no memory"), (Unavailable("a peer is gone"), "a peer is gone")],
)
def test_a_shutdown_after_the_end_keeps_the_failure_as_the_cause(failure: BaseException, told: str) -> None:
    status = EngineStatus(1)
    status.end(failure)
    status.close()
    assert (status.state, status.cause) == (S.FAILED, f"the engine of rank 1 has failed: {told}")
