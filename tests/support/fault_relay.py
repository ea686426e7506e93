"""A TCP relay that makes a bad network, for hosts whose kernel cannot: late bytes, segments sent again, resets.

`python fault_relay.py LISTEN_HOST TARGET_PORT TARGET_HOST` relays there, prints its own port, and obeys lines on its
standard input: "delay SECONDS LOSS", "reset". A lost segment is what TCP makes of it: everything after it waits for
its timeout of 200 ms and another trip.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

RETRANSMISSION_S = 0.2
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close at once, with a reset."""


class Relay:
    """The test's end: the relay as a process."""

    def __init__(
        self, target_port: int, listen: str = "127.0.0.1", wrap: Sequence[str] = (), target: str = "127.0.0.1"
    ) -> None:
        words = [*wrap, sys.executable, "-S", "-E", __file__, listen, str(target_port), target]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = f"{listen}:{int(self._process.stdout.readline())}"

    def delay(self, seconds: float, loss: float) -> None:
        """From now on each way takes so long, and this share of the segments is sent twice."""
        self._tell(f"delay {seconds} {loss}")

    def reset(self) -> None:
        """Resets every open connection."""
        self._tell("reset")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=5.0)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


class _Network:
    def __init__(self, target: str, target_port: int) -> None:
        self._target, self._target_port = target, target_port
        self._delay, self._loss = 0.0, 0.0
        self._random = random.Random(5)
        self._writers: set[asyncio.StreamWriter] = set()

    def obey(self, line: str) -> None:
        words = line.split()
        if words[0] == "delay":
            self._delay, self._loss = float(words[1]), float(words[2])
            return
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target, self._target_port)
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        except OSError:
            pass  # either side is gone; so will be the other
        finally:
            self._writers -= pair
            for each in pair:
                each.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        segments: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(10_000)
        delivery = asyncio.create_task(self._deliver(segments, writer))
        due = 0.0
        try:
            while True:
                data = await reader.read(1448)
                lost = self._random.random() < self._loss
                trip = self._delay + (RETRANSMISSION_S + self._delay if lost else 0.0)
                due = max(due, loop.time() + trip)
                await segments.put((due, data))
                if not data:
                    await delivery
                    return
        finally:
            delivery.cancel()

    async def _deliver(self, segments: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await segments.get()
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()


async def main(listen: str, target_port: int, target: str) -> None:
    network = _Network(target, target_port)
    server = await asyncio.start_server(network.serve, listen, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        network.obey(line)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
