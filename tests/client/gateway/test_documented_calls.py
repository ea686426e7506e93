"""The curl lines of the documentation work as they stand, but for the address and the model's name."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from support.gateway import fake_engine, gateway

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"


def curl_lines(text: str) -> list[str]:
    """Commands of the page's ```sh blocks that call this server, each with its continued lines."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.S | re.M)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    return [line for line in commands if line.startswith("curl ") and ADDRESS in line]


CALLS = [(page.name, line) for page in PAGES for line in curl_lines(page.read_text())]


def test_the_calls_are_found() -> None:
    assert {"README.md", "serving.md", "http.md"} <= {page for page, _ in CALLS}


@pytest.mark.parametrize(("page", "line"), CALLS)
async def test_a_documented_call_is_answered(page: str, line: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    async with gateway(fake_engine(max_model_len=1024), served_model_name="SmolLM2-135M-Instruct") as server:
        process = await asyncio.create_subprocess_shell(
            line.replace(ADDRESS, server.http_address) + " --silent --show-error --fail-with-body --max-time 20",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    answer = stdout.decode()
    assert process.returncode == 0, (answer, stderr.decode())
    if '"stream": true' in line:
        assert answer.rstrip().endswith("[DONE]") or "event: response.completed" in answer or "incomplete" in answer
    elif not re.search(r"/(metrics|health)\b", line):
        assert isinstance(json.loads(answer), dict)
