"""`@grpc/grpc-js` against the public service."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from support.fake_engine import ANSWER
from support.gateway import fake_engine, gateway
from support.node_client import SOURCE, node_client


async def run(*command: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, stdout.decode(), stderr.decode()


async def test_node_streams_the_answer_and_reads_the_status_of_what_fails(node_folder: Path) -> None:
    command = node_client(node_folder)
    async with gateway(fake_engine(step_s=0.001)) as server:
        assert await run(*command, server.grpc_address, "Hi", "100") == (0, ANSWER, "")
        code, _, complaint = await run(*command, server.grpc_address, "Hi", "0")
        assert (code, complaint) == (1, "INVALID_ARGUMENT: max_tokens is 0, must be from 1 to 2147483647\n")
        server.engine.fail_after = 5
        code, text, complaint = await run(*command, server.grpc_address, "Hi", "100")
        assert (code, text, complaint) == (1, ANSWER[:5], "UNAVAILABLE: rank 1 (pid 7 on here) died: signal 9\n")


def test_lock_file_pins_by_hash_and_names_no_registry() -> None:
    packages = json.loads((SOURCE / "package-lock.json").read_text())["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert installed
    assert all("integrity" in package and "resolved" not in package for package in installed.values())
