"""Nothing waits for ever for a child process: neither a question while all are busy, nor the end of a killed one."""

from __future__ import annotations

import signal
import subprocess
from unittest.mock import Mock

import pytest

from allspan.protos.api.errors import QueueFull
from allspan.protos.text import helper_process
from allspan.protos.text.helper_process import HelperPool, HelperProcess


def test_question_is_refused_when_no_process_gets_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "FREE_S", 0.05)
    pool = HelperPool("texts", most=2)
    pool._all = {Mock(HelperProcess), Mock(HelperProcess)}
    with pytest.raises(QueueFull, match=r"all 2 processes texts were busy for 0\.05 s; try again later"):
        pool.ask({}, 1.0)


def test_killed_process_that_the_system_holds_is_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    helper = HelperProcess.__new__(HelperProcess)
    helper._module, helper._socket = "texts", Mock()
    helper._process = Mock(pid=7, **{"wait.side_effect": subprocess.TimeoutExpired("texts", 0)})
    assert helper.end() == -signal.SIGKILL
    assert helper._exit_code() == -signal.SIGKILL
    assert all(call.args[0] > 0 for call in helper._process.wait.call_args_list)
    assert "the process texts (pid 7) has not ended 5 s after SIGKILL" in caplog.text
