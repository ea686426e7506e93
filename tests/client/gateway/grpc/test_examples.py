"""The examples of docs/grpc.md, built and run as they stand there: TLS, an API key, a deadline, errors with details."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan.protos.api.errors import QueueFull
from support import grpc_examples
from support.certificates import Certificates
from support.fake_engine import ANSWER
from support.gateway import Gateway, fake_engine, gateway

pytestmark = pytest.mark.timeout(400)

BUILDS: dict[str, Callable[[Path], list[str]]] = {
    "python": grpc_examples.python_example,
    "node": grpc_examples.node_example,
    "go": grpc_examples.go_example,
    "cpp": grpc_examples.cpp_example,
}


async def run(
    command: list[str], server: Gateway, prompt: str, ca: str, key: str = "secret", deadline_s: float = 30
) -> tuple[int | None, str, list[str]]:
    """Exit code, what it printed, and the lines of its complaint."""
    process = await asyncio.create_subprocess_exec(
        *command,
        server.grpc_address.replace("127.0.0.1", "localhost"),
        prompt,
        ca,
        env=os.environ | {"ALLSPAN_API_KEY": key, "ALLSPAN_DEADLINE_S": str(deadline_s)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    lines = [line for line in stderr.decode().splitlines() if not line.startswith(("E0", "E1", "I0", "I1", "W0", "W1"))]
    return process.returncode, stdout.decode(), lines


COMPILED = [pytest.param(language, marks=pytest.mark.nightly) for language in ("go", "cpp")]


@pytest.mark.parametrize("language", ["python", "node", *COMPILED])
async def test_an_example_streams_and_complains_with_details(
    language: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue("node_folder") if language == "node" else tmp_path
    command = await asyncio.to_thread(BUILDS[language], folder)
    (tmp_path / "certificates").mkdir()
    made = Certificates(tmp_path / "certificates")
    ca = made.pem("ca")
    settings = {"ssl_certfile": made.pem("server"), "ssl_keyfile": made.key("server"), "api_key": ("secret",)}
    async with gateway(fake_engine(max_model_len=1024), **settings) as server:
        assert await run(command, server, "Hi", ca) == (0, ANSWER, [])

        code, text, lines = await run(command, server, "", ca)
        assert (code, text) == (1, "")
        assert lines == ["INVALID_ARGUMENT: text is empty, must have at least one token", "  field text"]

        server.engine.refusal = QueueFull("1024 wait")
        assert (await run(command, server, "Hi", ca))[2] == ["RESOURCE_EXHAUSTED: 1024 wait", "  try again in 1 s"]
        server.engine.refusal = None

        code, _, lines = await run(command, server, "Hi", ca, key="guess")
        assert (code, lines[0].partition(":")[0]) == (1, "UNAUTHENTICATED")

        code, _, lines = await run(command, server, "Hi", made.pem("stranger"))
        assert (code, lines[0].partition(":")[0]) == (1, "UNAVAILABLE")

        server.engine.endless, server.engine.step_s = True, 0.2
        code, text, lines = await run(command, server, "Hi", ca, deadline_s=2.0)
        assert (code, lines[0].partition(":")[0]) == (1, "DEADLINE_EXCEEDED")
        assert ANSWER.startswith(text.rstrip())
        assert text
