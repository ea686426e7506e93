"""The supervisor's end of the connection to one host's keeper, which it starts through a remote shell."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import allspan
from allspan.launch.console import say
from allspan.launch.hosts.lines import LineBuffer, LineWriter, Silence
from allspan.launch.hosts.messages import BEAT_S, Facts, HostDone, HostLost, Message, RankExit, parse
from allspan.protos.api.errors import InternalError

HOST_TIMEOUT_S = 3.0
"""Default of --host-timeout: seconds of silence after which a host is lost, and after which it ends its ranks."""
START_TIMEOUT_S = 30.0
"""Seconds that a remote shell and the keeper may take to say the first word."""
KEPT_WORDS = 2048
"""Bytes kept of what the remote shell writes to standard error."""
OFFSETS = 64
"""Beats by which the clocks of two hosts are compared: the fastest of them tells the most."""


def keeper_command(python: str = sys.executable) -> list[str]:
    """Returns the words that start a keeper on a host with the same files at the same paths."""
    home = Path(allspan.__path__[0])
    if home.name != "allspan":  # an editable install, found by a hook of the environment's site module
        return [python, "-m", "allspan.launch.hosts.keeper"]
    return ["env", f"PYTHONPATH={home.parent}", python, "-S", "-m", "allspan.launch.hosts.keeper"]


class HostLink:
    """Starts a keeper by `words` (a remote shell, its host and `keeper_command()`), sends it messages and a beat five
    times a second, and calls `on_message` with each of its messages, from a thread of its own. The last is a HostLost,
    unless `close` came first."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        on_message: Callable[[Message], None],
        host_timeout_s: float = HOST_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.facts: Facts | None = None
        self.last_heard: float | None = None
        """The monotonic time of the keeper's last word; None before the first."""
        self._words = list(words)
        self._on_message = on_message
        self._limits_s = (start_timeout_s, host_timeout_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: LineWriter | None = None
        self._reader = threading.Thread(target=self._read, name=f"link-{name}", daemon=True)
        self._closing = False
        self._said = bytearray()
        self._offsets: deque[float] = deque(maxlen=OFFSETS)
        self._asked = 0
        self._answers: dict[int, HostDone] = {}
        self._changed = threading.Condition()

    def start(self) -> None:
        """Starts the remote shell. Returns at once: `facts` come by `on_message`. Raises InternalError when there is no
        such program."""
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to handle
            )
        except OSError as error:
            raise InternalError(f"host {self.name}: cannot run {self._words[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        self._writer = LineWriter(self._process.stdin.fileno(), lambda: {"do": "beat"}, f"beats-{self.name}")
        self._reader.start()

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message. Raises InternalError when too many wait for a link that takes none."""
        assert self._writer is not None, "start() comes first"
        self._writer.put(message)

    def ask(self, message: dict[str, Any], timeout_s: float) -> None:
        """Sends a message and waits until the keeper has done it. Raises InternalError with the host's name and what
        went wrong, also when there is no answer in time."""
        with self._changed:
            self._asked += 1
            number = self._asked
            self.send(message | {"id": number})
            done = self._changed.wait_for(lambda: number in self._answers or self._closing, timeout_s)
            answer = self._answers.pop(number, None)
        if answer is None:
            how = "its link ended" if done else f"it did not answer within {timeout_s:g} s"
            raise InternalError(f"host {self.name}: {message['do']}: {how}")
        if answer.error:
            raise InternalError(f"host {self.name}: {answer.error}")

    def close(self, timeout_s: float = 5.0) -> None:
        """Asks the keeper to end its ranks and remove its folders, waits for its end, and ends the remote shell; no
        HostLost follows. Idempotent."""
        if self._process is None or self._closing:
            return
        self._closing = True
        if self._writer is not None:
            with suppress(InternalError):
                self._writer.put({"do": "end"})
        # A keeper that has not said a word has begun nothing; its remote shell may wait for a host that is off.
        if threading.current_thread() is not self._reader and self.last_heard is not None:
            self._reader.join(timeout_s)
        self._hang_up()

    def _hang_up(self) -> None:
        """Ends the remote shell; a keeper that still runs then finds its input closed."""
        process, writer = self._process, self._writer
        assert process is not None
        assert process.stdin is not None
        process.kill()
        process.wait(5.0)
        if writer is None or writer.close(1.0):
            with suppress(OSError):
                process.stdin.close()
        with self._changed:
            self._changed.notify_all()

    def _read(self) -> None:
        """Passes on all that the keeper says until its output ends or it has been silent for too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with self._process.stdout as out, self._process.stderr as err:
            try:
                cause = self._listen(out.fileno(), err.fileno())
            except (InternalError, OSError) as error:
                cause = str(error)
        if self._closing:
            return
        self._hang_up()
        if words := bytes(self._said).decode(errors="replace").strip():
            cause += f"; its remote shell said: {words.splitlines()[-1]}"
        if not self._closing:
            self._closing = True
            self._on_message(HostLost(self.name, cause))

    def _listen(self, out: int, err: int) -> str:
        """Returns why the link ended."""
        poller, buffer, silence = select.poll(), LineBuffer(), Silence()
        for fd in (out, err):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(BEAT_S / 2 * 1000)]
            if err in ready and not self._hear_shell(err):
                poller.unregister(err)
            if out in ready:
                data = os.read(out, 1 << 16)
                if not data:
                    return self._ending()
                silence.heard()
                if self.last_heard is None:
                    self._show(bytes(self._said))
                now = self.last_heard = time.monotonic()
                for values in buffer.feed(data):
                    self._take(values, now)
            elif silence.look() > (limit := self._limits_s[self.last_heard is not None]):
                return f"nothing was heard of it for {limit:g} s"

    def _hear_shell(self, fd: int) -> bool:
        """Shows what the remote shell writes; before the keeper's first word it is kept, as it may be the reason why
        there is none."""
        data = os.read(fd, 1 << 16)
        self._said += data
        del self._said[:-KEPT_WORDS]
        if self.last_heard is not None:
            self._show(data)
        return bool(data)

    def _show(self, data: bytes) -> None:
        with suppress(OSError):  # a log that cannot be written is no reason to end a world
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    def _take(self, values: dict[str, Any], now: float) -> None:
        if "mono" in values:
            self._offsets.append(now - float(values["mono"]))
        if values.get("is") == "log":
            say(f"host {self.name}: {str(values.get('text')).removeprefix('allspan: ')}")
            return
        try:
            message = parse(self.name, values)
        except (TypeError, ValueError) as error:
            raise InternalError(f"host {self.name}: its keeper, of another version, says {values}: {error}") from error
        if isinstance(message, Facts):
            self.facts = message
        elif isinstance(message, RankExit):
            message = replace(message, moment=float(values.get("ended", now)) + min(self._offsets, default=0.0))
        elif isinstance(message, HostDone):
            with self._changed:
                self._answers[message.id] = message
                self._changed.notify_all()
        if message is not None:
            self._on_message(message)

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return "its keeper closed the connection"
        if self.last_heard is None:
            return f"the remote shell {self._words[0]} ended with status {code} before the keeper said a word"
        by = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"its keeper or remote shell {by}"
