"""A facade in a process of its own (in another network, say), which writes what becomes of its requests.

`python fault_facade.py RUN_DIR` attaches without resuming, and writes a line of JSON for each event: {"epoch": …} once
attached and at each request's start, {"tokens": […]}, {"end": reason}, {"error": class, "message": …}. A line with a
number of tokens on its standard input starts a greedy request, one at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_S = 30.0


class Facade:
    """The test's end. `events` grows."""

    def __init__(self, run_dir: Path, wrap: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*wrap, sys.executable, __file__, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + START_S
        while not self.events:
            assert time.monotonic() < deadline, f"the facade was not attached within {START_S:g} s"
            time.sleep(0.01)

    def start(self, num_tokens: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_tokens}\n")
        self._process.stdin.flush()

    @property
    def tokens(self) -> list[int]:
        """Of all requests so far."""
        return [token for event in list(self.events) for token in event.get("tokens", ())]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if "end" in event or "error" in event]

    def close(self) -> None:
        self._process.kill()
        self._reader.join(5.0)
        self._process.communicate(timeout=5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))


def main(run_dir: str) -> None:
    from allspan import ClientEngine, SamplingParams
    from allspan.protos.api.errors import AllspanError

    def tell(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    with ClientEngine(attach=Path(run_dir), resume=False) as engine:
        tell(epoch=engine.cluster.epoch)
        for line in sys.stdin:
            params = SamplingParams(max_tokens=int(line), temperature=0.0, ignore_eos=True)
            try:
                _, queue = engine.start_request([1, 2, 3], params)
                tell(epoch=engine.cluster.epoch)
                for output in queue:
                    tell(tokens=output.token_ids)
                tell(end="finished")
            except AllspanError as error:
                tell(error=type(error).__name__, message=error.message)


if __name__ == "__main__":
    main(sys.argv[1])
