"""Other engines, each in a process of its own interpreter (`compare_script.py`), stopped while it is not their turn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import AllspanError, ConfigError, DeadlineExceeded, InternalError, Unavailable

SCRIPT = Path(__file__).with_name("compare_script.py")
FIND_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
MAX_OUTPUT_CHARS = 300
"""Most characters of a process's last output that an error quotes."""

Message = dict[str, Any]


class Peer:
    """A process that runs one engine of a comparison. Between two requests it is stopped (SIGSTOP), so that its threads
    take nothing from the others."""

    def __init__(self, python: str, script: Path = SCRIPT, pauses: bool = True) -> None:
        """`pauses`: False for one that must go on answering others. Raises ConfigError for an interpreter that cannot
        be run."""
        self._python = python
        self._pauses = pauses
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        try:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # its own helpers are stopped and ended with it
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"--peers-python {python}: {error.strerror}") from None
        self._unread = b""

    def ask(self, request: Message, timeout: float) -> Message:
        """Sends a request and returns the answer. Raises DeadlineExceeded, Unavailable when it ended, InternalError
        with an error of its own."""
        deadline = time.monotonic() + timeout
        late = DeadlineExceeded(f"no answer to {request['do']!r} within --peers-timeout ({timeout:g} s)")
        try:
            self._signal(signal.SIGCONT)
            self._send(json.dumps(request).encode() + b"\n", deadline, late)
            answer: Message = json.loads(self._line(deadline, late))
        finally:
            if self._pauses:
                self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise InternalError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _send(self, line: bytes, deadline: float, late: DeadlineExceeded) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_WRITE)
            while line:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise late
                try:
                    line = line[os.write(pipe.fileno(), line) :]
                except BrokenPipeError:
                    raise self._ended() from None

    def _line(self, deadline: float, late: DeadlineExceeded) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise late
                if not (chunk := os.read(pipe.fileno(), 1 << 16)):
                    raise self._ended()
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> AllspanError:
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it has closed its pipes and lives on
            self._signal(signal.SIGKILL)
            code = self._process.wait()
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - MAX_OUTPUT_CHARS))
        words = " ".join(self._log.read().decode(errors="replace").split())
        return Unavailable(f"{self._python} ended with code {code}; it said last: {words or 'nothing'}")

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its helpers; none when it has ended and was waited for."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def find_engines(pythons: Sequence[str]) -> dict[str, str]:
    """Engine → the first of the interpreters that can import it.

    Raises ConfigError for one that cannot be run, knows no engine, or does not answer.
    """
    engines: dict[str, str] = {}
    for python in pythons:
        peer = Peer(python)
        try:
            found = peer.ask({"do": "find"}, FIND_TIMEOUT_S)["found"]
        except AllspanError as error:
            raise ConfigError(f"--peers-python {python}: {error}") from None
        finally:
            peer.close()
        if not found:
            raise ConfigError(f"--peers-python {python}: neither llama_cpp nor openvino_genai can be imported there")
        for engine in found:
            engines.setdefault(engine, python)
    return engines


def model_files(given: Sequence[str], engines: Sequence[str], ours: str) -> dict[str, str]:
    """Engine → GGUF file, from FILE and ENGINE=FILE; `ours` where nothing is given. ConfigError for what is no file."""
    files = dict.fromkeys(engines, ours)
    for entry in sorted(given, key=lambda entry: "=" in entry):  # what names an engine wins
        engine, _, path = entry.rpartition("=")
        if engine and engine not in engines:
            raise ConfigError(
                f"--peers-model {entry}: no such engine was found; there is: {', '.join(engines) or 'none'}"
            )
        files.update(dict.fromkeys([engine] if engine else engines, path))
    for engine, path in files.items():
        if not path.endswith(".gguf") or not Path(path).is_file():
            raise ConfigError(f"{engine} reads GGUF files, and {path} is none: give --peers-model FILE.gguf")
    return files
