"""Child processes that do what may run away: each answers one question at a time, within a deadline.

    pool = HelperPool("allspan.protos.text.template_child", most=4)
    answer = pool.ask({…}, within_s=5.0)

A child limits its own memory (`helper_child`), sees little of the parent's environment, and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from allspan.protos.api.errors import InternalError, QueueFull

logger = logging.getLogger("allspan.helper")

ATTEMPTS = 3
"""Number of processes that are asked the same question when one after the other ends instead of answering."""
START_S = 30.0
"""Seconds within which a process must be ready."""
BUSY_WAIT_S = 0.05
"""Seconds that a question waits for a process which is busy before another one is started for it."""
FREE_S = 30.0
"""Seconds that a question waits for a process when as many are busy as there may be."""
KILL_S = 5.0
"""Seconds within which a process that is killed ends, unless the system holds it."""
_TIME_IS_OVER = (-signal.SIGALRM, -signal.SIGPROF)
"""Codes of processes that have set themselves a limit of time."""
_CHUNK = 1 << 18
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME")


class HelperEnded(Exception):
    """A process ended instead of answering; `code` is negative for a signal."""

    def __init__(self, module: str, code: int) -> None:
        super().__init__(f"the process {module} ended with code {code}")
        self.code = code


class HelperNotReady(HelperEnded):
    """A process ended, or was not ready in time, before it was asked anything."""


class HelperProcess:
    """One child process, the module `module` run with `words`."""

    def __init__(self, module: str, words: Sequence[str], greeting: Mapping[str, Any]) -> None:
        """`greeting`: the first question, whose answer says that the process is ready."""
        self._module = module
        self._greeting: Mapping[str, Any] | None = greeting
        self._socket, theirs = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONPATH": paths}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *words],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """The answer. Raises TimeoutError, HelperEnded, HelperNotReady; then the process must be ended."""
        self.wait_until_ready()
        return self._exchange(question, within_s)

    def wait_until_ready(self) -> None:
        """Raises HelperNotReady; then the process must be ended."""
        if self._greeting is None:
            return
        try:
            self._exchange(self._greeting, START_S)
        except (TimeoutError, HelperEnded) as error:
            raise HelperNotReady(self._module, self._exit_code()) from error
        self._greeting = None

    def kill(self) -> None:
        """Ends the process at once; who asks it gets HelperEnded."""
        self._process.kill()

    def end(self) -> int:
        """Ends the process at once, unless it has ended by itself; returns its exit code."""
        self._socket.close()
        return self._killed()

    def _exchange(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        data = json.dumps(question).encode() + b"\n"
        try:
            self._socket.settimeout(within_s)
            self._socket.sendall(data)
            chunks = [self._received(deadline)]
            while not chunks[-1].endswith(b"\n"):
                chunks.append(self._received(deadline))
        except (BrokenPipeError, ConnectionResetError):
            raise HelperEnded(self._module, self._exit_code()) from None
        answer: dict[str, Any] = json.loads(b"".join(chunks))
        return answer

    def _received(self, deadline: float) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        chunk = self._socket.recv(_CHUNK)
        if not chunk:
            raise BrokenPipeError
        return chunk

    def _exit_code(self) -> int:
        """The code with which a process that has closed its end ends by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)
        return self._killed()

    def _killed(self) -> int:
        self._process.kill()
        try:
            return self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            logger.warning("the process %s (pid %d) has not ended %g s after SIGKILL", self._module, self.pid, KILL_S)
            return -signal.SIGKILL


class HelperPool:
    """Children of one kind, started when they are needed and kept, for any number of threads.

    A question whose child ends, killed from outside or not, is asked again in a fresh one: only HelperEnded after
    `ATTEMPTS` of them is about the question."""

    def __init__(
        self, module: str, words: Sequence[str] = (), most: int = 4, greeting: Mapping[str, Any] | None = None
    ) -> None:
        """`most`: most children at once. `greeting`: each one's first question."""
        self._module = module
        self._words = words
        self._greeting = greeting or {}
        self._most = most
        self._closed = False
        self._all: set[HelperProcess] = set()
        self._idle: list[HelperProcess] = []
        self._changed = threading.Condition()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """The answer of a child. Raises TimeoutError, HelperEnded, QueueFull when no child is free for FREE_S, and
        InternalError when children do not start. `within_s` counts from when a child is free and ready."""
        for left in reversed(range(ATTEMPTS)):
            try:
                return self._asked(question, within_s)
            except HelperNotReady as error:
                if self._closed:
                    raise
                logger.warning("%s before it was ready", error)
                if not left:
                    raise InternalError(f"{error} before it was ready, at {ATTEMPTS} starts") from error
            except HelperEnded as error:
                if error.code in _TIME_IS_OVER:
                    raise TimeoutError from error
                if not left or self._closed:
                    raise
            self._end_idle()  # others may have been killed as well
        raise AssertionError

    def warm(self) -> None:
        """Starts a child, unless there is one."""
        with self._changed:
            if not self._all:
                self._idle.append(self._start())

    def prepare(self) -> None:
        """Starts a child, unless there is one, and waits until it is ready. Raises HelperNotReady."""
        helper = self._take()
        try:
            helper.wait_until_ready()
        except BaseException:
            self._end(helper)
            raise
        self._put_back(helper)

    def close(self) -> None:
        """Ends the children; questions that some are at, and later ones, raise HelperEnded."""
        self._closed = True
        with self._changed:
            for helper in self._all:
                helper.kill()
        self._end_idle()

    def _end_idle(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
        for helper in idle:
            self._end(helper)

    def _end(self, helper: HelperProcess) -> None:
        helper.end()
        with self._changed:
            self._all.discard(helper)
            self._changed.notify()

    def _asked(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        helper = self._take()
        try:
            answer = helper.ask(question, within_s)
        except BaseException:
            self._end(helper)
            raise
        self._put_back(helper)
        return answer

    def _take(self) -> HelperProcess:
        with self._changed:
            if not self._idle and self._all:
                self._changed.wait_for(lambda: self._idle or not self._all, BUSY_WAIT_S)
            if not self._changed.wait_for(lambda: self._idle or len(self._all) < self._most, FREE_S):
                raise QueueFull(
                    f"all {self._most} processes {self._module} were busy for {FREE_S:g} s; try again later"
                )
            return self._idle.pop() if self._idle else self._start()

    def _start(self) -> HelperProcess:
        if self._closed:
            raise HelperEnded(self._module, -signal.SIGKILL)
        helper = HelperProcess(self._module, self._words, self._greeting)
        self._all.add(helper)
        return helper

    def _put_back(self, helper: HelperProcess) -> None:
        with self._changed:
            self._idle.append(helper)
            self._changed.notify()

    def _forget(self) -> None:
        """Forgets the children, which are the parent's of a forked process."""
        self._all, self._idle = set(), []
        self._changed = threading.Condition()
